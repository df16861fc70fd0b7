"""What the doctor says of a broker that runs: its version, its topics, what it keeps."""

from __future__ import annotations

import pytest

from rlstreams.check.doctor import broker
from rlstreams.check.doctor.check import Check, Level
from rlstreams.streams.kafka.facts import BrokerFacts, TopicFacts
from rlstreams.streams.log.topics import TOPICS
from rlstreams.workers.bootstrap.parts import topic_plan
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig


def facts(**changes: object) -> BrokerFacts:
    plan = topic_plan(RunConfig())
    topics = {
        t.name: TopicFacts(partitions=plan.partitions(t), settings=plan.settings(t)) for t in TOPICS
    }
    values = {
        "brokers": frozenset({1}),
        "metadata_version": 29,
        "features": {"group.version": 1, "transaction.version": 2},
        "settings": {},
        "topics": topics,
    }
    return BrokerFacts(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({"metadata_version": 30}, "broker", "4.3"),
        ({"features": {}}, "protocol", "KIP-848"),
        ({"settings": {"transaction.max.timeout.ms": 5000}}, "protocol", "5000"),
        ({"settings": {"message.max.bytes": 500_000}}, "protocol", "500000"),
        ({"brokers": frozenset()}, "replicas", "brokers are 0"),
        ({"disk_free_bytes": 10_000_000}, "broker disk", "0.0 GB free"),
    ],
)
def test_a_broker_that_cannot_be_used(changes: dict[str, object], name: str, told: str) -> None:
    """What is wrong, and what to do about it."""
    bad = [c for c in _broker_checks(facts(**changes)) if c.level is not Level.OK]
    assert [name] == [check.name for check in bad]
    assert told in bad[0].found
    assert bad[0].advice
    assert bad[0].level is Level.FAIL


@pytest.mark.parametrize(
    ("topic", "settings", "words", "told"),
    [
        ("steps", {"retention.ms": "3600000"}, [], "has retention.ms=3600000, the con"),
        ("trajectories", {"retention.ms": "3600000"}, [], "wants 604800000"),
        ("steps", {}, ["--broker.fsync=true"], "run.steps has flush.messages=None"),
        (
            "steps",
            {},
            ["--broker.replication=3", "--broker.bootstrap=a:1"],
            "run.prompts has min.insync.replicas=None",
        ),
    ],
)
def test_topics_that_keep_less_than_planned(
    topic: str, settings: dict[str, str], words: list[str], told: str
) -> None:
    """Made before the setting changed, or by somebody else."""
    good = facts()
    cut = TopicFacts(partitions=good.topics[topic].partitions, settings=settings)
    given = facts(topics={**good.topics, topic: cut})
    checks = {check.name: check for check in broker.checks_of("b:1", given, load([], words))}
    assert (Level.FAIL, True) == (
        checks["topic settings"].level,
        told in checks["topic settings"].found,
    )


def test_partitions_that_are_not_as_planned() -> None:
    config = load([], ["--rollout.workers=9"])
    checks = {check.name: check for check in broker.checks_of("b:1", facts(), config)}
    assert Level.FAIL == checks["topics"].level
    assert "run.prompts has 8 partitions and rollout.workers is 9" in checks["topics"].found


def _broker_checks(given: BrokerFacts) -> list[Check]:
    return list(broker.checks_of("b:1", given, RunConfig()))
