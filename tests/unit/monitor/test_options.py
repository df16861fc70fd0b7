"""What `broker.options` says, in the words of the monitor's client."""

from __future__ import annotations

import pytest
from faust.auth import SASLCredentials, SSLCredentials

from rlstreams.show.health.app import credentials
from rlstreams.streams.log.errors import ConfigError


def test_a_login_is_mapped() -> None:
    """Names are librdkafka's; what only tunes it is passed by."""
    options = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanisms": "scram-sha-512",
        "sasl.username": "me",
        "sasl.password": "x",
        "socket.keepalive.enable": "true",
    }
    found = credentials(options)
    assert isinstance(found, SASLCredentials)
    assert ("me", "x", "SCRAM-SHA-512") == (found.username, found.password, found.mechanism.value)
    assert credentials({}) is None


def test_tls_checks_the_host_unless_told_not_to() -> None:
    lax = {"ssl.endpoint.identification.algorithm": "none"}
    for options, checks in (({}, True), (lax, False)):
        found = credentials({"security.protocol": "SSL", **options})
        assert isinstance(found, SSLCredentials)
        assert found.context.check_hostname is checks


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sasl.oauthbearer.config": "x"}, "sasl.oauthbearer.config"),
        ({"ssl.engine.location": "x"}, "ssl.engine.location"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}, "GSSAPI"),
        ({"security.protocol": "TLS"}, "TLS"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "sasl.username"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/nowhere"}, "ssl"),
    ],
)
def test_what_it_has_no_word_for_is_refused_by_name(options: dict[str, str], named: str) -> None:
    """Better than to connect otherwise than the roles."""
    with pytest.raises(ConfigError, match=named):
        credentials(options)
