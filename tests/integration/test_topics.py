"""Provisioning against the real broker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.admin import ConfigResource, KafkaAdminClient

from rlstreams.__main__ import main
from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.schemas.events import EVENTS
from rlstreams.streams.kafka.admin import apply, broker_version_warning, listing
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.errors import BrokerError, TopicMismatchError
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import TOPICS
from tests.newer_release import newer_text

PLAN = TopicPlan(rollout_workers=2, logprob_workers=1)


def test_apply_creates_the_table_once(broker: str, run_id: str) -> None:
    """The first call creates every topic as planned, the second finds nothing to do."""
    created = apply(broker, run_id, PLAN)

    assert created == tuple(f"{run_id}.{topic.name}" for topic in TOPICS)
    assert apply(broker, run_id, PLAN) == ()
    counts = {row.name: row.partitions for row in listing(broker, run_id)}
    assert counts == {topic.name: PLAN.partitions(topic) for topic in TOPICS}


def test_a_topic_deleted_in_between_is_created_again(broker: str, run_id: str) -> None:
    """Only what is missing is created."""
    apply(broker, run_id, PLAN)
    admin = KafkaAdminClient(bootstrap_servers=broker)
    admin.delete_topics([f"{run_id}.worker-events"])
    admin.close()

    assert apply(broker, run_id, PLAN) == (f"{run_id}.worker-events",)


def test_other_partitions_are_refused_and_nothing_is_created(broker: str, run_id: str) -> None:
    """A run with more workers than its topics were made for is told both counts."""
    apply(broker, run_id, PLAN)
    wider = TopicPlan(rollout_workers=5, logprob_workers=1)

    with pytest.raises(TopicMismatchError, match=rf"{run_id}\.prompts has 4 .* wants 10"):
        apply(broker, run_id, wider)


def test_settings_reach_the_broker(broker: str, run_id: str) -> None:
    """Retention is what the plan says, and the size limit is left at the broker's default."""
    apply(broker, run_id, PLAN)
    admin = KafkaAdminClient(bootstrap_servers=broker)
    names = [f"{run_id}.{topic.name}" for topic in TOPICS]
    found = admin.describe_configs([ConfigResource("TOPIC", name) for name in names])["topic"]
    admin.close()

    for topic, name in zip(TOPICS, names, strict=True):
        set_here = {key: entry["value"] for key, entry in found[name].items()}
        assert PLAN.settings(topic).items() <= set_here.items()
        assert "max.message.bytes" not in set_here


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


def test_every_schema_is_published_once_under_its_fingerprint(broker: str, run_id: str) -> None:
    """Whoever reads `schemas` can decode every event; applying again adds nothing."""
    apply(broker, run_id, PLAN)
    apply(broker, run_id, PLAN)

    rows = {row.name: row.num_records for row in listing(broker, run_id)}
    texts = _published(broker, f"{run_id}.schemas", rows["schemas"])

    assert rows["schemas"] == len(EVENTS)
    assert {json.loads(text)["name"] for text in texts.values()} == {e.__name__ for e in EVENTS}
    assert all(key == fingerprint(text).hex() for key, text in texts.items())


def test_schemas_of_a_recording_are_published_beside_ours(broker: str, run_id: str) -> None:
    """Whoever replays a newer release's records brings its schemas; once."""
    text = newer_text("Prompt")
    for _ in range(2):
        apply(broker, run_id, PLAN, schemas=[text, schema_text("Prompt")])
    with KafkaBus(broker, run_id) as bus:
        assert text == bus.schemas().get(fingerprint(text))
    rows = {row.name: row.num_records for row in listing(broker, run_id)}
    assert rows["schemas"] == len(EVENTS) + 1


def test_listing_of_an_unknown_run_shows_every_topic_as_missing(broker: str, run_id: str) -> None:
    """A run without topics is no error to look at."""
    assert [row.partitions for row in listing(broker, run_id)] == [0] * len(TOPICS)


def test_more_replicas_than_brokers_is_the_brokers_refusal(broker: str, run_id: str) -> None:
    """The broker's own words are in the error."""
    plan = TopicPlan(rollout_workers=1, logprob_workers=1, replication=200)

    with pytest.raises(BrokerError, match="replication factor"):
        apply(broker, run_id, plan)


def test_the_pinned_version_needs_no_warning(broker: str) -> None:
    """The embedded broker is not one of those that lose markers."""
    assert broker_version_warning(broker) == ""


def test_the_command_lists_what_it_created(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`topics list` answers 1 while a topic is missing; other partitions are status 78."""
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\nid = "{run_id}"\n[broker]\nbootstrap = "{broker}"\n', "utf-8")

    assert main(["topics", "list", str(config)]) == 1
    assert main(["topics", "apply", str(config)]) == 0
    assert main(["topics", "list", str(config)]) == 0
    assert main(["topics", "apply", str(config), "--rollout.workers", "9"]) == 78
    out = capsys.readouterr()
    assert f"created {run_id}.steps" in out.out
    assert f"{run_id}.prompts has 2 partitions, the configuration wants 18" in out.err


def test_without_a_broker_the_command_says_how_to_start_one(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No address and no embedded broker: a configuration error with the way out.

    `list` would start the stopped broker of a run; of one that never ran it says that.
    """
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\nid = "{run_id}"\ndir = "{tmp_path}"\n', "utf-8")

    assert main(["topics", "apply", str(config)]) == 78
    assert f"rlstreams broker start --dir {tmp_path}/broker" in capsys.readouterr().err
    assert main(["topics", "list", str(config)]) == 78
    assert f"run {run_id} has left no log under {tmp_path}" in capsys.readouterr().err


def test_a_broker_that_is_down_is_named() -> None:
    """The address that does not answer is in the message."""
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1: .*refused"):
        listing("127.0.0.1:1", "nobody")


def _published(bootstrap: str, topic: str, num_records: int) -> dict[str, str]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap)
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    texts: dict[str, str] = {}
    for _ in range(num_records):
        record = next(consumer)
        texts[record.key.decode()] = record.value.decode()
    consumer.close()
    return texts
