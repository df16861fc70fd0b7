"""The roles' connection options as credentials of Faust.

`broker.options` holds librdkafka's properties. What decides whether and as whom one connects is
mapped or refused by name; properties that only tune librdkafka are passed by.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlstreams.streams.log.errors import ConfigError

if TYPE_CHECKING:
    from faust.types.auth import CredentialsT

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


def credentials(options: Mapping[str, str]) -> CredentialsT | None:
    """The login that `broker.options` describes; None: neither TLS nor a password.

    Args:
        options: librdkafka properties, secrets resolved.

    Raises:
        ConfigError: an option that Faust has no word for, a mechanism that it does not speak, a
            name that is missing, or files that cannot be read.
    """
    from faust.auth import SASLCredentials, SSLCredentials

    for name in options:
        if name.startswith(_DECISIVE) and name not in _KNOWN:
            raise ConfigError(
                f"broker.options {name!r} has no counterpart in the monitor's client; it knows "
                f"{', '.join(_KNOWN)}. `rlstreams metrics` connects as the roles do"
            )
    protocol = options.get("security.protocol", PROTOCOLS[0]).upper()
    _among("security.protocol", protocol, PROTOCOLS)
    tls = _context(options) if protocol.endswith("SSL") else None
    if not protocol.startswith("SASL"):
        return SSLCredentials(tls) if tls else None
    mechanism = options.get("sasl.mechanisms", options.get("sasl.mechanism", "")).upper()
    _among("sasl.mechanisms", mechanism, MECHANISMS)
    if not options.get("sasl.username"):
        raise ConfigError("broker.options 'sasl.username' is missing")
    return SASLCredentials(
        username=options["sasl.username"],
        password=options.get("sasl.password", ""),
        ssl_context=tls,
        mechanism=mechanism,
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
