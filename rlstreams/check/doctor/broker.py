"""Checks of a broker that runs: its version, its limits, this run's topics. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.check.doctor.check import Check, fail, ok, probed, warn
from rlstreams.streams.kafka.admin import refuse_counts, version_warning
from rlstreams.streams.kafka.facts import BrokerFacts, broker_facts
from rlstreams.streams.log.topics import TOPICS
from rlstreams.workers.bootstrap.parts import client_options, topic_plan
from rlstreams.workers.config.run import RunConfig

LOW_DISK_BYTES = 1_000_000_000
TRANSACTION_MS = 30_000  # `transaction.timeout.ms` of our producers
LEAST = {  # of the broker's limits; the second is a part of a record, with its headers
    "transaction.max.timeout.ms": TRANSACTION_MS,
    "message.max.bytes": 1_000_000,
}


def broker_checks(bootstrap: str, config: RunConfig) -> Iterator[Check]:
    """Version, groups, transactions' limits, disk, replicas, topics and their settings.

    Raises:
        BrokerError: it cannot be reached, or refused.
        DeadlineError: it stopped delivering.
    """
    facts = broker_facts(bootstrap, config.run.id, client_options(config))
    yield from checks_of(bootstrap, facts, config)


def checks_of(bootstrap: str, facts: BrokerFacts, config: RunConfig) -> Iterator[Check]:
    """All checks of a broker, by its facts."""
    found = f"{bootstrap}: Apache Kafka {facts.release}, {facts.num_brokers} broker(s)"
    if warning := version_warning(facts.metadata_version):
        advice = "use Apache Kafka 4.2.1, or leave broker.bootstrap empty for the embedded one"
        yield fail("broker", f"{found}: {warning}", advice)
    else:
        yield ok("broker", found)
    yield _protocol(facts)
    if 0 <= facts.disk_free_bytes < LOW_DISK_BYTES:
        yield fail(
            "broker disk", f"{facts.disk_free_bytes / 1e9:.1f} GB free",
            "a full disk stops the broker: free some, or lower the topics' retention.bytes",
        )  # fmt: skip
    yield replication_check(facts, config)
    yield from _topics(facts, config)


def _protocol(facts: BrokerFacts) -> Check:
    """Groups of KIP-848 and transactions, from the features in force and the broker's limits."""
    if facts.features.get("group.version", 0) < 1:
        return fail(
            "protocol", "consumer groups of KIP-848 are off (group.version 0)",
            "needs Apache Kafka 4.0 or newer; `kafka-features upgrade --feature group.version=1`",
        )  # fmt: skip
    for name, least in LEAST.items():
        if (value := facts.settings.get(name, least)) < least:
            advice = f"set it to {least} or more at the broker"
            return fail("protocol", f"{name} is {value}; {least} is needed", advice)
    level = facts.features.get("transaction.version", 0)
    return ok("protocol", f"KIP-848 groups, transactions (transaction.version {level})")


def replication_check(facts: BrokerFacts, config: RunConfig) -> Check:
    """Enough brokers for the replicas that are wanted, and copies enough in sync for a write.

    Where a broker that holds copies does not answer, the advice is to start it; only where none is
    missing is it to change the configuration.
    """
    wanted, down = config.broker.replication, facts.assigned - facts.brokers
    is_new = any(not t.is_later and t.name not in facts.topics for t in TOPICS)
    if wanted > facts.num_brokers:  # before the run has topics; else a node may be gone on purpose
        down |= facts.fenced
    weak = [
        f"{config.run.id}.{name}[{number}]"
        for name, topic in facts.topics.items()
        for number, one in topic.copies.items()
        if len(one.in_sync)
        < min(len(one.assigned), int(topic.settings.get("min.insync.replicas", 1)))
    ]
    found = f"broker.replication is {wanted}, brokers are {facts.num_brokers}"
    if weak:
        found += (
            f"; fewer copies in sync than min.insync.replicas, so writes are refused: {weak[0]}"
        )
    if down:
        names = ", ".join(map(str, sorted(down)))
        text = f"{found}; there is no answer from {names}"
        answer = fail if weak or is_new else warn
        return answer("replicas", text, f"start {names}; leave broker.replication as it is")
    if wanted > facts.num_brokers:
        return fail("replicas", found, "start as many brokers, or lower broker.replication")
    if weak:
        return fail("replicas", found, "wait until their brokers have caught up")
    return ok("replicas", found)


def _topics(facts: BrokerFacts, config: RunConfig) -> Iterator[Check]:
    """Partition counts and settings of the topics that exist: as found, against the plan."""
    plan, run = topic_plan(config), config.run.id
    have = {topic: facts.topics[topic.name] for topic in TOPICS if topic.name in facts.topics}
    if not have:
        yield ok("topics", f"run {run!r} has none yet; `up`, or `broker topics`, makes them")
        return
    lacking = [
        f"{run}.{topic.name} has {name}={found.settings.get(name)}, the configuration wants {value}"
        for topic, found in have.items()
        for name, value in plan.settings(topic).items()
        if _is_less(found.settings.get(name), value, name)
    ]

    def counts() -> Check:
        refuse_counts(run, plan, {topic.name: facts.partitions for topic, facts in have.items()})
        if missing := [topic.name for topic in TOPICS if topic not in have]:
            return warn(
                "topics", f"missing: {', '.join(missing)}", "`rlstreams broker topics` them"
            )
        return ok("topics", f"all {len(have)} of run {run!r}, with partitions for every worker")

    yield from probed("topics", counts)
    if lacking:
        yield fail(
            "topic settings", "; ".join(lacking),
            "samples may be lost, or gone before a redo reads them: `rlstreams broker topics` sets "
            "flush.messages and longer retention; set the rest with kafka-configs.sh",
        )  # fmt: skip
    else:
        yield ok("topic settings", "retention and durability as planned")


def _is_less(found: str | None, wanted: str, name: str) -> bool:
    """Whether a topic keeps less than planned: a shorter retention, or a weaker promise."""
    if not name.startswith("retention."):
        return found != wanted
    if found is None or found == "-1":  # the broker's default is unknown, and so is a bound
        return False
    return wanted == "-1" or int(found) < int(wanted)
