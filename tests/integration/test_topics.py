"""Provisioning against the real broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kafka.admin import ConfigResource, KafkaAdminClient

from rlstreams.__main__ import main
from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.schemas.events import EVENTS
from rlstreams.streams.kafka.admin import apply, listing
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import TOPICS
from tests.newer_release import newer_text

PLAN = TopicPlan(rollout_workers=2, logprob_workers=1)


def test_the_table_is_made_once_with_its_settings(broker: str, run_id: str) -> None:
    """What is missing is created, as planned; the second call finds nothing to do.

    The size limit of messages is left at the broker's default.
    """
    assert {} == listing(broker, run_id)
    names = [f"{run_id}.{topic.name}" for topic in TOPICS]
    assert apply(broker, run_id, PLAN) == tuple(names)
    assert apply(broker, run_id, PLAN) == ()
    counts = {name: it.partitions for name, it in listing(broker, run_id).items()}
    assert counts == {topic.name: PLAN.partitions(topic) for topic in TOPICS}

    admin = KafkaAdminClient(bootstrap_servers=broker)
    found = admin.describe_configs([ConfigResource("TOPIC", name) for name in names])["topic"]
    for topic, name in zip(TOPICS, names, strict=True):
        set_here = {key: entry["value"] for key, entry in found[name].items()}
        assert PLAN.settings(topic).items() <= set_here.items()
        assert "max.message.bytes" not in set_here
    admin.delete_topics([f"{run_id}.worker-events"])
    admin.close()
    assert apply(broker, run_id, PLAN) == (f"{run_id}.worker-events",)


def test_retention_of_payloads_is_lengthened_and_never_shortened(broker: str, run_id: str) -> None:
    """An operator's longer one stays; a longer one of the configuration is applied."""

    def kept(topic: str) -> tuple[str, str]:
        admin = KafkaAdminClient(bootstrap_servers=broker)
        name = f"{run_id}.{topic}"
        found = admin.describe_configs([ConfigResource("TOPIC", name)])["topic"][name]
        admin.close()
        return found["retention.ms"]["value"], found["retention.bytes"]["value"]

    def plan(payload_ms: int, payload_bytes: int) -> TopicPlan:
        return replace(PLAN, payload_ms=payload_ms, payload_bytes=payload_bytes)

    apply(broker, run_id, plan(1000, 5000))
    others = kept("prompts")
    assert apply(broker, run_id, plan(2000, 4000)) == ()
    assert ("2000", "5000") == kept("trajectories")
    apply(broker, run_id, plan(500, -1))
    assert ("2000", "-1") == kept("scored-trajectories")
    assert others == kept("prompts")


def test_schemas_of_a_recording_are_published_beside_ours(broker: str, run_id: str) -> None:
    """Whoever replays a newer release's records brings its schemas; once."""
    text = newer_text("Prompt")
    for _ in range(2):
        apply(broker, run_id, PLAN, schemas=[text, schema_text("Prompt")])
    with KafkaBus(broker, run_id) as bus:
        assert text == bus.schemas().get(fingerprint(text))
        # The newer one, and the transaction's marker.
        assert sum(bus.ends("schemas").values()) == len(EVENTS) + 2


def test_more_replicas_than_brokers_is_the_brokers_refusal(broker: str, run_id: str) -> None:
    """The broker's own words are in the error."""
    plan = TopicPlan(rollout_workers=1, logprob_workers=1, replication=200)

    with pytest.raises(BrokerError, match="replication factor"):
        apply(broker, run_id, plan)


def test_the_command_says_what_it_created(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each topic by name, once; more workers than partitions are status 78."""
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\nid = "{run_id}"\n[broker]\nbootstrap = "{broker}"\n', "utf-8")

    assert main(["broker", "topics", str(config)]) == 0
    assert main(["broker", "topics", str(config)]) == 0
    assert main(["broker", "topics", str(config), "--rollout.workers", "9"]) == 78
    out = capsys.readouterr()
    assert f"created {run_id}.steps" in out.out
    assert "nothing was missing" in out.out
    assert f"{run_id}.prompts has 8 partitions and rollout.workers is 9" in out.err


def test_without_a_broker_the_command_says_how_to_start_one(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No address and no embedded broker: a configuration error with the way out.

    `tail` would start the stopped broker of a run; of one that never ran it says that.
    """
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\nid = "{run_id}"\ndir = "{tmp_path}"\n', "utf-8")

    assert main(["broker", "topics", str(config)]) == 78
    assert f"rlstreams broker start {tmp_path}/broker" in capsys.readouterr().err
    assert main(["broker", "tail", "steps", str(config)]) == 78
    assert f"run {run_id} has left no log under {tmp_path}" in capsys.readouterr().err


def test_a_broker_that_is_down_is_named() -> None:
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1: .*refused"):
        listing("127.0.0.1:1", "nobody")
