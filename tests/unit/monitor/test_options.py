"""What `broker.options` says, in the words of the monitor's client."""

from __future__ import annotations

import pytest

from rlstreams.show.monitor.options import Login, login
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
    assert Login(
        protocol="SASL_PLAINTEXT", mechanism="SCRAM-SHA-512", username="me", password="x"
    ) == login(options)
    assert Login() == login({})


def test_tls_checks_the_host_unless_told_not_to() -> None:
    """As librdkafka does."""
    tls = login({"security.protocol": "SSL"}).tls
    lax = login({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}).tls
    assert tls is not None
    assert lax is not None
    assert (True, False) == (tls.check_hostname, lax.check_hostname)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sasl.oauthbearer.config": "x"}, "sasl.oauthbearer.config"),
        ({"ssl.engine.location": "x"}, "ssl.engine.location"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}, "GSSAPI"),
        ({"security.protocol": "TLS"}, "TLS"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/nowhere"}, "ssl"),
    ],
)
def test_what_it_has_no_word_for_is_refused_by_name(options: dict[str, str], named: str) -> None:
    """Better than to connect otherwise than the roles."""
    with pytest.raises(ConfigError, match=named):
        login(options)
