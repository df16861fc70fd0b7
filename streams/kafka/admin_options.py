"""The roles' connection options, in the words of the administration client. Pure.

`broker.options` holds librdkafka's properties, which the roles' clients take as they are. The
administration client is kafka-python, which calls the same things by other names. Sources:
librdkafka's CONFIGURATION.md, and the keyword arguments of kafka-python's `KafkaAdminClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _checks_hostname(text: str) -> bool:
    return text.strip().lower() == "https"


# librdkafka's property: (kafka-python's argument, how its value is read).
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
    "ssl.endpoint.identification.algorithm": ("ssl_check_hostname", _checks_hostname),
    "client.id": ("client_id", str),
}


def admin_settings(options: Mapping[str, str]) -> dict[str, object]:
    """Keyword arguments for kafka-python; properties that it has no word for are passed by.

    Args:
        options: librdkafka properties, secrets resolved.
    """
    known = {name: text for name, text in options.items() if name in _NAMES}
    return {_NAMES[name][0]: _NAMES[name][1](text) for name, text in known.items()}
