"""A broker that is down is to be started; only too few of them are a matter of configuration."""

from __future__ import annotations

import pytest

from rlstreams.check.doctor.broker import replication_check
from rlstreams.check.doctor.check import Level
from rlstreams.streams.kafka.facts import BrokerFacts, Replicas, TopicFacts
from rlstreams.streams.log.topics import TOPICS
from rlstreams.workers.config.load import load

THREE = load([], ["--broker.replication=3", "--broker.bootstrap=a:1"])
ALL = (1, 2, 3)
OLDER = tuple(topic.name for topic in TOPICS if not topic.is_later)


def facts(
    brokers: tuple[int, ...], in_sync: tuple[int, ...], names: tuple[str, ...] | None = None
) -> BrokerFacts:
    """A cluster of three whose topics have a copy on each, with those brokers alive."""
    topic = TopicFacts(
        partitions=1,
        settings={"min.insync.replicas": "2"},
        copies={0: Replicas(assigned=ALL, in_sync=in_sync)},
    )
    return BrokerFacts(
        brokers=frozenset(brokers),
        metadata_version=29,
        features={},
        settings={},
        topics=dict.fromkeys([t.name for t in TOPICS] if names is None else names, topic),
        fenced=frozenset(ALL) - frozenset(brokers),
    )


@pytest.mark.parametrize(
    ("given", "level", "told", "advice"),
    [
        (facts(ALL, ALL), Level.OK, "is 3", ""),
        (facts((1, 3), (1, 3)), Level.WARN, "there is no answer from 2", "start 2"),
        (facts((1,), (1,)), Level.FAIL, "answer from 2, 3", "start 2, 3"),
        (facts((1, 3), (1, 3), ()), Level.FAIL, "no answer from 2", "start 2; leave"),
        (facts((1, 3), (1, 3), OLDER), Level.WARN, "there is no answer from 2", "start 2"),
        (facts(ALL, (1, 3)), Level.OK, "brokers are 3", ""),
        (facts(ALL, (3,)), Level.FAIL, "writes are refused: run.prompts[0]", "have caught up"),
    ],
)
def test_what_a_cluster_of_three_lacks(
    given: BrokerFacts, level: Level, told: str, advice: str
) -> None:
    """Nobody is told to lower the replication because a broker is down for a while."""
    check = replication_check(given, THREE)
    assert (level, True) == (check.level, told in check.found), check
    assert advice in check.advice
    assert "lower" not in check.advice


def test_a_cluster_that_never_had_as_many() -> None:
    """No broker is missing, so there the configuration asks for too much."""
    alone = BrokerFacts(
        brokers=frozenset({1}), metadata_version=29, features={}, settings={}, topics={},
    )  # fmt: skip
    check = replication_check(alone, THREE)
    assert (Level.FAIL, "broker.replication is 3, brokers are 1") == (check.level, check.found)
    assert "start as many brokers, or lower broker.replication" == check.advice
