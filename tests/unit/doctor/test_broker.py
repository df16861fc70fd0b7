"""What the doctor says of a broker that runs: its version, its topics, what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlstreams.start.doctor import broker, replicas
from rlstreams.start.doctor.check import Check, Level
from rlstreams.start.doctor.kept import kept_check
from rlstreams.streams.kafka.facts import BrokerFacts, OpenTransaction, TopicFacts
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import LogRange
from rlstreams.streams.log.topics import STEPS, TOPICS
from rlstreams.streams.memory.bus import MemoryBus
from rlstreams.workers.bootstrap.parts import topic_plan
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from tests.factories import step_completed
from tests.logs import made_log

HANGING = OpenTransaction(
    partition="run.steps[0]", producer_id=9, first_offset=7, age_s=36.0, transactional_id="t"
)
QUICK = {"group.consumer.session.timeout.ms": 4000}


def facts(**changes: object) -> BrokerFacts:
    plan = topic_plan(RunConfig())
    topics = {
        t.name: TopicFacts(partitions=plan.partitions(t), settings=plan.settings(t)) for t in TOPICS
    }
    values = {
        "brokers": frozenset({1}),
        "metadata_version": 29,
        "features": {"group.version": 1, "transaction.version": 2},
        "settings": QUICK,
        "topics": topics,
    }
    return BrokerFacts(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({"metadata_version": 30}, "broker", "4.3"),
        ({"features": {}}, "protocol", "KIP-848"),
        ({"settings": {**QUICK, "transaction.max.timeout.ms": 5000}}, "protocol", "5000"),
        ({"settings": {**QUICK, "message.max.bytes": 500_000}}, "protocol", "500000"),
        ({"settings": {}}, "recovery", "45 s"),
        ({"brokers": frozenset()}, "replicas", "brokers are 0"),
        ({"transactions": (HANGING,)}, "transactions", "run.steps[0] from offset 7 on, for 36 s"),
        ({"disk_free_bytes": 10_000_000}, "broker disk", "0.0 GB free"),
    ],
)
def test_a_broker_that_cannot_be_used(changes: dict[str, object], name: str, told: str) -> None:
    """What is wrong, and what to do about it; the default session timeout is a warning."""
    bad = [c for c in _broker_checks(facts(**changes)) if c.level is not Level.OK]
    assert [name] == [check.name for check in bad]
    assert told in bad[0].found
    assert bad[0].advice
    assert (Level.WARN if name == "recovery" else Level.FAIL) == bad[0].level


def test_a_transaction_that_is_still_within_its_time() -> None:
    """Every worker has one open ten times a second."""
    young = replace(HANGING, age_s=3.0)
    check = broker.transactions_check(facts(transactions=(young,)))
    assert (Level.OK, "none hanging; 1 open now") == (check.level, check.found)


def test_a_disk_with_less_room_than_the_run_has_taken() -> None:
    """A warning: the run may be half done."""
    held = {0: LogRange(begin=0, end=9, num_bytes=5_000_000_000)}
    topics = {"steps": TopicFacts(partitions=1, settings={}, kept=held)}
    check = broker.disk_check(facts(topics=topics, disk_free_bytes=4_000_000_000))
    assert (Level.WARN, "4.0 GB free, the run holds 5000 MB") == (check.level, check.found)


def test_less_durable_than_promised() -> None:
    """Topics that were made before `broker.fsync`, or with another minimum of copies."""
    forced = load([], ["--broker.fsync=true"])
    check = broker.durability_check(facts(), forced)
    assert Level.FAIL == check.level
    assert "run.steps has flush.messages=None" in check.found
    three = load([], ["--broker.replication=3", "--broker.bootstrap=a:1"])
    check = broker.durability_check(facts(), three)
    assert "run.prompts has min.insync.replicas=None" in check.found
    assert "power cut" in broker.durability_check(facts(), RunConfig()).found


@pytest.mark.parametrize(
    ("begin", "settings", "level"),
    [
        (0, {}, Level.OK),
        (42, {"retention.ms": "1000"}, Level.WARN),
        (43, {}, Level.FAIL),
    ],
)
def test_what_a_restart_needs_is_still_there(
    begin: int, settings: dict[str, str], level: Level
) -> None:
    """The step's positions against what the topic has and keeps."""
    log = made_log()
    bus = MemoryBus(log, "run")
    kept = TopicFacts(partitions=1, settings=settings, kept={0: LogRange(begin=begin, end=99)})
    given = facts(topics={"scored-trajectories": kept})
    assert Level.OK == kept_check(bus, given, 1).level
    with bus.producer("trainer.0") as producer:
        producer.commit([outgoing(STEPS, step_completed(3))])
    assert level is kept_check(bus, given, 1).level


def test_a_good_broker() -> None:
    """Nothing to say about the embedded one."""
    assert {Level.OK} == {check.level for check in _broker_checks(facts())}


@pytest.mark.parametrize(
    ("topic", "setting", "level"),
    [("steps", "3600000", Level.FAIL), ("trajectories", "3600000", Level.WARN)],
)
def test_retention_against_redo(topic: str, setting: str, level: Level) -> None:
    """The ledger is kept for ever; payloads as long as redo needs them."""
    good = facts()
    cut = TopicFacts(partitions=good.topics[topic].partitions, settings={"retention.ms": setting})
    checks = broker.topic_checks(facts(topics={**good.topics, topic: cut}), RunConfig())
    (bad,) = [check for check in checks if check.level is not Level.OK]
    assert ("retention", level) == (bad.name, bad.level)
    assert f"run.{topic} keeps 1 h" in bad.found


def test_partitions_that_are_not_as_planned() -> None:
    """Both counts are named."""
    config = load([], ["--rollout.workers=3"])
    checks = {check.name: check for check in broker.topic_checks(facts(), config)}
    assert Level.FAIL == checks["topics"].level
    assert "run.prompts has 2 partitions, the configuration wants 6" in checks["topics"].found


def _broker_checks(given: BrokerFacts) -> list[Check]:
    config = RunConfig()
    return [
        broker.version_check("b:1", given),
        broker.protocol_check(given),
        broker.recovery_check(given),
        broker.transactions_check(given),
        broker.disk_check(given),
        replicas.replication_check(given, config),
        broker.durability_check(given, config),
        *broker.topic_checks(given, config),
    ]


def test_a_run_that_has_steps_is_to_be_continued() -> None:
    """`up` would refuse to begin it."""
    good = facts()
    steps = replace(good.topics["steps"], kept={0: LogRange(begin=0, end=9)})
    given = facts(topics={**good.topics, "steps": steps})
    (check,) = [c for c in broker.topic_checks(given, RunConfig()) if c.name == "run"]
    assert (Level.OK, True) == (check.level, "`up --resume` continues it" in check.found)
    assert "run" not in {c.name for c in broker.topic_checks(good, RunConfig())}
