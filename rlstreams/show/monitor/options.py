"""The roles' connection options in the words of the monitor's client. Pure.

`broker.options` holds librdkafka's properties. The monitor's client is aiokafka, behind Faust, and
takes an `ssl.SSLContext` and a name, password and mechanism. What decides whether and as whom one
connects is mapped or refused by name; properties that only tune librdkafka are passed by.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from rlstreams.streams.log.errors import ConfigError

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_KNOWN = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
)
_DECISIVE = ("security.", "sasl.", "ssl.", "enable.ssl.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How to connect."""

    protocol: str = PROTOCOLS[0]
    mechanism: str = ""  # of MECHANISMS; without SASL none
    username: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None


def login(options: Mapping[str, str]) -> Login:
    """The login that `broker.options` describes.

    Args:
        options: librdkafka properties, secrets resolved.

    Raises:
        ConfigError: an option that this client has no word for, a mechanism that it does not
            speak, or files that cannot be read.
    """
    for name in options:
        if name.startswith(_DECISIVE) and name not in _KNOWN:
            raise ConfigError(
                f"broker.options {name!r} has no counterpart in the monitor's client; it knows "
                f"{', '.join(_KNOWN)}. `rlstreams metrics` connects as the roles do"
            )
    protocol = options.get("security.protocol", PROTOCOLS[0]).upper()
    mechanism = options.get("sasl.mechanisms", options.get("sasl.mechanism", "")).upper()
    _among("security.protocol", protocol, PROTOCOLS)
    if protocol.startswith("SASL"):
        _among("sasl.mechanisms", mechanism, MECHANISMS)
    return Login(
        protocol=protocol,
        mechanism=mechanism,
        username=options.get("sasl.username", ""),
        password=options.get("sasl.password", ""),
        tls=_context(options) if protocol.endswith("SSL") else None,
    )


def _among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"broker.options {name!r} is {value!r}; the monitor's client speaks {', '.join(known)}"
        )


def _context(options: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl.ca.location"))
        if certificate := options.get("ssl.certificate.location"):
            key, password = options.get("ssl.key.location"), options.get("ssl.key.password")
            context.load_cert_chain(certificate, key, password)
    except OSError as err:
        raise ConfigError(f"broker.options: the files of ssl.* cannot be used: {err}") from err
    check = options.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
    context.check_hostname = check == "https"
    return context
