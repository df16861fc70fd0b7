"""The check that something listens at a broker's address, made before and without a client."""

from __future__ import annotations

import socket

from rlstreams.streams.log.errors import BrokerError

CONNECT_S = 10.0
NOT_KAFKA = (
    "something listens there and does not speak Kafka as we do: check the port, and broker.options "
    "for one that wants TLS or a password (security.protocol, ssl.ca.location, sasl.mechanisms)"
)


class NobodyThereError(BrokerError):
    """No address of a broker takes a connection; `problems` names each."""

    def __init__(self, problems: str) -> None:
        super().__init__(
            f"no broker answers at {problems}; start it, or correct broker.bootstrap "
            "(empty: an embedded one)"
        )
        self.problems = problems


def refuse_silence(bootstrap: str) -> None:
    """Check that one of the addresses takes a connection.

    Call it before a client, which tries a dead address for all of its timeout and then leaves its
    socket open.

    Raises:
        NobodyThereError: no address takes one.
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
    raise NobodyThereError("; ".join(problems))
