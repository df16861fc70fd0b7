"""Admin requests to a cluster that also work right after one of its nodes has died.

A killed node stays in the metadata until its session times out (9 s by default). Until then a
client may send it a request that any node could answer, and is refused. Uses kafka-python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import TypeVar

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaConnectionError, KafkaError, NodeNotReadyError

from rlstreams.streams.kafka.reachable import CONNECT_S, NOT_KAFKA, refuse_silence
from rlstreams.streams.log.errors import BrokerError

T = TypeVar("T")

REQUEST_MS = 30_000
RETRY_S = 20.0  # longer than a dead node stays in the metadata
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
_PAUSE_S = 0.3
_UNREACHABLE = (KafkaConnectionError, NodeNotReadyError)
# By librdkafka's property, as `broker.options` has it: kafka-python's argument, and the parser of
# its value (librdkafka's CONFIGURATION.md; keyword arguments of `KafkaAdminClient`).
_NAMES: dict[str, tuple[str, Callable[[str], object]]] = {
    "security.protocol": ("security_protocol", str.upper),  # librdkafka takes `sasl_ssl` as well
    "sasl.mechanism": ("sasl_mechanism", str.upper),
    "sasl.mechanisms": ("sasl_mechanism", str.upper),
    "sasl.username": ("sasl_plain_username", str),
    "sasl.password": ("sasl_plain_password", str),
    "sasl.kerberos.service.name": ("sasl_kerberos_service_name", str),
    "ssl.ca.location": ("ssl_cafile", str),
    "ssl.certificate.location": ("ssl_certfile", str),
    "ssl.key.location": ("ssl_keyfile", str),
    "ssl.key.password": ("ssl_password", str),
    "ssl.crl.location": ("ssl_crlfile", str),
    "ssl.endpoint.identification.algorithm": (
        "ssl_check_hostname",
        lambda text: text.strip().lower() == "https",
    ),
    "client.id": ("client_id", str),
}


def asked(
    bootstrap: str,
    options: Mapping[str, str],
    ask: Callable[[KafkaAdminClient], T],
    *,
    within_s: float = RETRY_S,
) -> T:
    """Call `ask` with a new client for each try; return its answer.

    The client waits `CONNECT_S` for the first node and `REQUEST_MS` for each answer. While a node
    that another node names refuses connections, `asked` tries again for `within_s`.

    Args:
        ask: the requests; they may be repeated, so a second call must change nothing more.

    Raises:
        BrokerError: no node can be reached, one refused, or one was unreachable for too long.
    """
    refuse_silence(bootstrap)
    until_s = time.monotonic() + within_s
    while True:
        try:
            admin = KafkaAdminClient(
                bootstrap_servers=bootstrap.split(","),
                bootstrap_timeout_ms=int(CONNECT_S * 1000),
                request_timeout_ms=REQUEST_MS,
                **admin_settings(options),
            )
            with closing(admin):
                return ask(admin)
        except _UNREACHABLE as error:
            if time.monotonic() >= until_s:
                why = f"{error!r}, and so for {within_s:g} s"
                raise BrokerError(f"broker {bootstrap}: a node is unreachable: {why}") from error
            time.sleep(_PAUSE_S)
        except KafkaError as error:
            if "bootstrap" in str(error):  # the node takes connections, see `refuse_silence`
                raise BrokerError(f"broker {bootstrap}: {NOT_KAFKA}") from error
            raise BrokerError(f"broker {bootstrap}: {error}") from error


def admin_settings(options: Mapping[str, str]) -> dict[str, object]:
    """Return keyword arguments for kafka-python; properties without such an argument are left out.

    Args:
        options: librdkafka properties, secrets resolved.
    """
    known = {name: text for name, text in options.items() if name in _NAMES}
    return {_NAMES[name][0]: _NAMES[name][1](text) for name, text in known.items()}
