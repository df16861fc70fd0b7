"""Whether a broker that runs is one that we can use, and has this run's topics. Looks only."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.start.doctor.check import Check, fail, ok, warn
from rlstreams.start.doctor.kept import kept_check
from rlstreams.start.doctor.replicas import replication_check
from rlstreams.streams.kafka.admin import version_warning
from rlstreams.streams.kafka.facts import BrokerFacts, broker_facts
from rlstreams.streams.log.topic import Retention, Topic
from rlstreams.streams.log.topic_plan import FLUSH
from rlstreams.streams.log.topics import STEPS, TOPICS
from rlstreams.workers.bootstrap.parts import client_options, open_bus, topic_plan
from rlstreams.workers.config.run import RunConfig

SLOW_RECOVERY_S = 10.0
SETTLE_S = 5.0  # beyond its timeout, for the broker's own clean-up
LOW_DISK_BYTES = 1_000_000_000
TRANSACTION_MS = 30_000  # `transaction.timeout.ms` of our producers
PART_BYTES = 1_000_000  # a part of a record, with its headers
_ADVICE_4_X = "use Apache Kafka 4.2.1, or leave broker.bootstrap empty for the embedded one"


def broker_checks(bootstrap: str, config: RunConfig) -> Iterator[Check]:
    """Version, groups, transactions, expected recovery, disk, topics, durability, retention.

    Raises:
        BrokerError: it cannot be reached, or refused.
        DeadlineError: it stopped delivering.
    """
    facts = broker_facts(bootstrap, config.run.id, client_options(config))
    yield version_check(bootstrap, facts)
    yield protocol_check(facts)
    yield recovery_check(facts)
    yield transactions_check(facts)
    yield disk_check(facts)
    yield replication_check(facts, config)
    yield durability_check(facts, config)
    yield from topic_checks(facts, config)
    if STEPS.name in facts.topics:
        with open_bus(config) as bus:
            yield kept_check(bus, facts, config.trainer.checkpoint_every)


def version_check(bootstrap: str, facts: BrokerFacts) -> Check:
    """4.3.x loses transactions at a restart."""
    found = f"{bootstrap}: Apache Kafka {facts.release}, {facts.num_brokers} broker(s)"
    if warning := version_warning(facts.metadata_version):
        return fail("broker", f"{found}: {warning}", _ADVICE_4_X)
    return ok("broker", found)


def protocol_check(facts: BrokerFacts) -> Check:
    """Groups of KIP-848 and transactions, from the features in force and the broker's limits."""
    if facts.features.get("group.version", 0) < 1:
        return fail(
            "protocol", "consumer groups of KIP-848 are off (group.version 0)",
            "needs Apache Kafka 4.0 or newer; `kafka-features upgrade --feature group.version=1`",
        )  # fmt: skip
    timeout_ms = facts.settings.get("transaction.max.timeout.ms", TRANSACTION_MS)
    if timeout_ms < TRANSACTION_MS:
        return fail(
            "protocol", f"transaction.max.timeout.ms is {timeout_ms}, below our {TRANSACTION_MS}",
            f"set it to {TRANSACTION_MS} or more at the broker",
        )  # fmt: skip
    largest = facts.settings.get("message.max.bytes", PART_BYTES)
    if largest < PART_BYTES:
        return fail(
            "protocol", f"message.max.bytes is {largest}; parts of large records are 900 kB",
            f"set it to {PART_BYTES} or more at the broker",
        )  # fmt: skip
    level = facts.features.get("transaction.version", 0)
    return ok("protocol", f"KIP-848 groups, transactions (transaction.version {level})")


def recovery_check(facts: BrokerFacts) -> Check:
    """A killed worker's partitions move after the session timeout, and not before."""
    timeout_s = facts.settings.get("group.consumer.session.timeout.ms", 45_000) / 1000
    found = f"the samples of a killed worker go to another after about {timeout_s:g} s"
    if timeout_s <= SLOW_RECOVERY_S:
        return ok("recovery", found)
    return warn(
        "recovery", f"{found} (group.consumer.session.timeout.ms)",
        "set group.consumer.session.timeout.ms=4000, group.consumer.min.session.timeout.ms=3000, "
        "group.consumer.heartbeat.interval.ms=1000 and "
        "group.consumer.min.heartbeat.interval.ms=500 at the broker, and restart it",
    )  # fmt: skip


def transactions_check(facts: BrokerFacts) -> Check:
    """An open transaction older than its timeout is one that nobody will end."""
    hanging = [t for t in facts.transactions if t.age_s > TRANSACTION_MS / 1000 + SETTLE_S]
    if not hanging:
        return ok("transactions", f"none hanging; {len(facts.transactions)} open now")
    found = "; ".join(
        f"{t.partition} from offset {t.first_offset} on, for {t.age_s:.0f} s, by "
        f"{t.transactional_id or 'an id that no coordinator knows'} (producer {t.producer_id})"
        for t in hanging
    )
    return fail(
        "transactions", f"readers are held back by unfinished transactions:  {found}",
        "`kafka-transactions.sh describe --transactional-id ID`, and unless its state is "
        "CompleteCommit `kafka-transactions.sh abort --topic T --partition P --start-offset N`; "
        "then `rlstreams audit`",
    )  # fmt: skip


def disk_check(facts: BrokerFacts) -> Check:
    """What the broker has left, against what this run has written so far."""
    held = sum(kept.num_bytes for topic in facts.topics.values() for kept in topic.kept.values())
    if facts.disk_free_bytes < 0:
        return ok("broker disk", f"the broker does not say; the run holds {held / 1e6:.0f} MB")
    found = f"{facts.disk_free_bytes / 1e9:.1f} GB free, the run holds {held / 1e6:.0f} MB"
    advice = "a full disk stops the broker: free some, or lower the topics' retention.bytes"
    if facts.disk_free_bytes < LOW_DISK_BYTES:
        return fail("broker disk", found, advice)
    return (
        warn("broker disk", found, advice) if facts.disk_free_bytes < held
        else ok("broker disk", found)
    )  # fmt: skip


def durability_check(facts: BrokerFacts, config: RunConfig) -> Check:
    """What an acknowledged record outlives: `min.insync.replicas` and forced writes."""
    section = config.broker
    plan = topic_plan(config)
    lax = [
        f"{config.run.id}.{topic.name} has {name}={facts.topics[topic.name].settings.get(name)}"
        for topic in TOPICS
        if topic.name in facts.topics
        for name, value in plan.settings(topic).items()
        if name in ("min.insync.replicas", FLUSH)
        and facts.topics[topic.name].settings.get(name) != value
    ]
    if lax:
        return fail(
            "durability", f"{'; '.join(lax)}: less than the configuration promises",
            "`rlstreams topics apply` sets flush.messages; set min.insync.replicas=2 yourself",
        )  # fmt: skip
    if section.fsync:
        return ok("durability", "every batch is on disk before it is acknowledged (broker.fsync)")
    if section.replication >= 3:
        return ok("durability", "an acknowledged record is on at least two brokers")
    return ok(
        "durability",
        "one copy, not forced to disk: survives killed processes, not a power cut "
        "(broker.fsync = true does)",
    )


def topic_checks(facts: BrokerFacts, config: RunConfig) -> Iterator[Check]:
    """Partition counts and retention of the topics that exist."""
    plan = topic_plan(config)
    have = [topic for topic in TOPICS if topic.name in facts.topics]
    if not have:
        yield ok(
            "topics", f"run {config.run.id!r} has none yet; `up`, or `topics apply`, makes them"
        )
        return
    wrong = [
        f"{config.run.id}.{topic.name} has {facts.topics[topic.name].partitions} partitions, "
        f"the configuration wants {plan.partitions(topic)}"
        for topic in have
        if facts.topics[topic.name].partitions != plan.partitions(topic)
    ]
    if wrong:
        yield fail(
            "topics", "; ".join(wrong),
            "partitions of a run never change: restore rollout.workers, logprob.workers and "
            "broker.partitions_per_worker, or choose another run.id",
        )  # fmt: skip
    elif missing := [topic.name for topic in TOPICS if topic not in have]:
        yield warn("topics", f"missing: {', '.join(missing)}", "`rlstreams topics apply` them")
    else:
        yield ok("topics", f"all {len(have)} of run {config.run.id!r}, partitions as planned")
    steps = facts.topics.get(STEPS.name)
    if steps is not None and any(kept.end > kept.begin for kept in steps.kept.values()):
        yield ok(
            "run", f"{config.run.id!r} has steps: `up --resume` continues it, `up` refuses to begin"
        )
    yield retention_check(facts, config, have)


def retention_check(facts: BrokerFacts, config: RunConfig, have: list[Topic]) -> Check:
    """Redo reads the records of all steps since the last checkpoint, the audit reads the ledger."""
    plan = topic_plan(config)
    cut, short = [], []
    for topic in have:
        settings = facts.topics[topic.name].settings
        name = f"{config.run.id}.{topic.name}"
        retention_ms = int(settings.get("retention.ms", -1))
        if topic.retention is Retention.LONG and retention_ms >= 0:
            cut.append(f"{name} keeps {_hours(retention_ms)}, must keep all")
        elif topic.retention is Retention.PAYLOAD and 0 <= retention_ms < plan.payload_ms:
            short.append(f"{name} keeps {_hours(retention_ms)}")
    every = config.trainer.checkpoint_every
    if cut:
        return fail("retention", "; ".join(cut), "set retention.ms=-1 on them")
    if short:
        return warn(
            "retention", "; ".join(short),
            f"longer than {every} steps take (trainer.checkpoint_every), or a crash cannot be "
            "redone; lengthen retention.ms or checkpoint more often",
        )  # fmt: skip
    return ok("retention", f"holds what redo needs: {every} steps since the last checkpoint")


def _hours(milliseconds: int) -> str:
    return f"{milliseconds / 3_600_000:.3g} h"
