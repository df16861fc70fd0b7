"""Whether anything listens where a broker is said to be; asked before a client, and without one."""

from __future__ import annotations

import socket

from rlstreams.streams.log.errors import BrokerError

CONNECT_S = 10.0
NOT_KAFKA = (
    "something listens there and does not speak Kafka as we do: check the port, and "
    "broker.options for one that wants TLS or a password"
)


def refuse_silence(bootstrap: str) -> None:
    """One of the addresses takes a connection.

    Asked before the client, which tries a dead address for all of its timeout and then leaves its
    socket open.

    Raises:
        BrokerError: none does.
    """
    problems = []
    for address in map(str.strip, bootstrap.split(",")):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, ValueError) as error:
            problems.append(f"{address}: {error}")
        else:
            return
    raise BrokerError(
        f"no broker answers at {'; '.join(problems)}; start it, or correct broker.bootstrap "
        "(empty: an embedded one)"
    )
