"""Whether a broker that runs is one that we can use, and has this run's topics. Looks only."""

from __future__ import annotations

from collections.abc import Iterator

from streams.admin import version_warning
from streams.kafka_facts import BrokerFacts, broker_facts
from streams.topic import Retention, Topic
from streams.topics import TOPICS
from workers.bootstrap import topic_plan
from workers.config import RunConfig
from workers.doctor.check import Check, fail, ok, warn

SLOW_RECOVERY_S = 10.0
TRANSACTION_MS = 30_000  # `transaction.timeout.ms` of our producers
PART_BYTES = 1_000_000  # a part of a record, with its headers
_ADVICE_4_X = "use Apache Kafka 4.2.1, or leave broker.bootstrap empty for the embedded one"


def broker_checks(bootstrap: str, config: RunConfig) -> Iterator[Check]:
    """Version, groups, transactions, expected recovery, topics, retention.

    Raises:
        BrokerError: it cannot be reached, or refused.
    """
    facts = broker_facts(bootstrap, config.run.id)
    yield version_check(bootstrap, facts)
    yield protocol_check(facts)
    yield recovery_check(facts)
    yield replication_check(facts, config)
    yield from topic_checks(facts, config)


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


def replication_check(facts: BrokerFacts, config: RunConfig) -> Check:
    """Enough brokers for the replicas that are wanted."""
    wanted = config.broker.replication
    found = f"broker.replication is {wanted}"
    if wanted > facts.num_brokers:
        return fail("replicas", f"{found}, brokers are {facts.num_brokers}", "lower it")
    if wanted == 1:
        return ok("replicas", f"{found}: survives killed processes, not a lost disk")
    return ok("replicas", found)


def topic_checks(facts: BrokerFacts, config: RunConfig) -> Iterator[Check]:
    """Partition counts and retention of the topics that exist."""
    plan = topic_plan(config)
    have = [topic for topic in TOPICS if topic.name in facts.topics]
    if not have:
        yield ok("topics", f"run {config.run.id!r} has none yet; `up` creates them")
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
