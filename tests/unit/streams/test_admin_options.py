"""One set of connection options serves two clients."""

from __future__ import annotations

from kafka.admin import KafkaAdminClient

from rlstreams.streams.broker.config import FSYNC, server_properties
from rlstreams.streams.kafka.admin_ask import _NAMES, admin_settings
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import TOPICS


def test_tls_and_sasl_options_are_translated() -> None:
    """Values as the other client reads them."""
    assert {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "me",
        "sasl_plain_password": "secret",
        "ssl_cafile": "/ca.pem",
        "ssl_certfile": "/me.pem",
        "ssl_keyfile": "/me.key",
        "ssl_password": "key",
        "ssl_check_hostname": False,
    } == admin_settings(
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "scram-sha-512",
            "sasl.username": "me",
            "sasl.password": "secret",
            "ssl.ca.location": "/ca.pem",
            "ssl.certificate.location": "/me.pem",
            "ssl.key.location": "/me.key",
            "ssl.key.password": "key",
            "ssl.endpoint.identification.algorithm": "none",
        }
    )


def test_what_only_the_roles_clients_know_is_passed_by() -> None:
    """Tuning of one client is no error of the other; both spellings of the mechanism are known."""
    given = {"socket.keepalive.enable": "true", "sasl.mechanism": "PLAIN"}
    assert {"sasl_mechanism": "PLAIN"} == admin_settings(given)


def test_every_name_is_one_that_the_client_takes() -> None:
    """A misspelt one would be refused at the first connection."""
    assert set() == {name for name, _ in _NAMES.values()} - KafkaAdminClient.DEFAULT_CONFIG.keys()


def test_forced_writes_are_a_setting_of_every_topic() -> None:
    """And of the broker, whose own topics hold positions and transactions."""
    plan = TopicPlan(rollout_workers=1, logprob_workers=1, fsync=True)
    assert {"1"} == {plan.settings(topic)["flush.messages"] for topic in TOPICS}
    lax = TopicPlan(rollout_workers=1, logprob_workers=1)
    assert not any("flush.messages" in lax.settings(topic) for topic in TOPICS)
    assert {"log.flush.interval.messages": "1"} == FSYNC


def test_another_listener_for_clients(tmp_path: object) -> None:
    """The listener's name is its security protocol; what is not named stays."""
    from pathlib import Path

    text = server_properties(Path(str(tmp_path)), 9, 8, {"inter.broker.listener.name": "SSL"})
    lines = text.splitlines()
    assert "listeners=SSL://127.0.0.1:9,CONTROLLER://127.0.0.1:8" in lines
    assert "inter.broker.listener.name=SSL" in lines
    assert "node.id=1" in lines
