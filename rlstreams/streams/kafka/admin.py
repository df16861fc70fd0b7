"""Makes the broker match the table of topics, and lists its topics. Uses kafka-python.

`options` are the roles' own (`broker.options`, secrets resolved): TLS and SASL apply here as well.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping

from kafka.admin import ConfigResource, KafkaAdminClient

from rlstreams.streams.kafka.admin_ask import NO_OPTIONS, REQUEST_MS, asked
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.kafka.facts import TopicFacts, topics_of
from rlstreams.streams.log.catalogue import publish_missing
from rlstreams.streams.log.errors import AbortedError, TopicMismatchError
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import STEPS, TOPICS

_METADATA_4_3 = 30  # metadata.version 4.3-IV0, the highest that 4.3.x supports


def apply(
    bootstrap: str,
    run: str,
    plan: TopicPlan,
    options: Mapping[str, str] = NO_OPTIONS,
    schemas: Collection[str] = (),
) -> tuple[str, ...]:
    """Create missing topics and publish the schemas; return the full names of new topics.

    Settings of topics that exist stay as they are but for two: `flush.messages` follows a plan
    with forced writes, and the retention of payloads is lengthened. It is never shortened: an
    operator may have lengthened it, and records would be lost.

    Args:
        schemas: texts of other releases, published beside our own for their records, which are
            about to be written into the run.

    Raises:
        TopicMismatchError: topics of the run do not fit each other, or the plan; no change.
        BrokerError: the broker cannot be reached, or refused.
    """
    wanted = {topic: f"{run}.{topic.name}" for topic in TOPICS}
    created: list[str] = []  # over all tries

    def ask(admin: KafkaAdminClient) -> None:
        found = topics_of(admin, run)
        have = {name: facts.partitions for name, facts in found.items()}
        refuse_counts(run, plan, have)
        counts = plan.beside(have)
        missing = {
            name: plan.made(topic, counts[topic])
            for topic, name in wanted.items()
            if topic.name not in found
        }
        if missing:
            admin.create_topics(missing, timeout_ms=REQUEST_MS)
            created.extend(missing)
            admin.wait_for_topics(list(missing), timeout_ms=REQUEST_MS)
        changes = {
            name: plan.strengthened(topic, found[topic.name].settings)
            for topic, name in wanted.items()
            if topic.name in found
        }
        if changed := [ConfigResource("TOPIC", name, new) for name, new in changes.items() if new]:
            admin.alter_configs(changed)

    asked(bootstrap, options, ask)
    until_s = time.monotonic() + REQUEST_MS / 1000
    with KafkaBus(bootstrap, run, options=options) as bus:
        while True:
            try:
                publish_missing(bus, f"apply-{secrets.token_hex(4)}", schemas)
                break
            except (AbortedError, TopicMismatchError):  # a new topic: not every node knows it yet
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.2)
    return tuple(created)


def refuse_counts(run: str, plan: TopicPlan, found: Mapping[str, int]) -> None:
    """Refuse other partition counts than planned: they would tear samples of a group apart.

    Args:
        found: partitions of the run's topics, by their names in the table.

    Raises:
        TopicMismatchError: names each topic with its partitions found and planned.
    """
    if wrong := plan.problems(run, found):
        raise TopicMismatchError(
            f"{'; '.join(wrong)}. Partitions of a run never change: lower the number of workers, "
            "or choose another run.id; broker.headroom says for how many a new run has room"
        )


def listing(
    bootstrap: str, run: str, options: Mapping[str, str] = NO_OPTIONS
) -> Mapping[str, TopicFacts]:
    """Return the topics of the run that the broker holds, by their names in the table.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    return asked(bootstrap, options, lambda admin: topics_of(admin, run))


def runs_of(bootstrap: str, options: Mapping[str, str]) -> list[str]:
    """Return the ids of the runs whose topics a broker holds.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    names = asked(bootstrap, options, lambda admin: admin.list_topics())
    mark = f".{STEPS.name}"
    return sorted(name.removesuffix(mark) for name in names if name.endswith(mark))


def broker_version_warning(bootstrap: str, options: Mapping[str, str]) -> str:
    """Return a warning about this broker's version; "": none.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    features = asked(bootstrap, options, lambda admin: admin.describe_features())
    _, newest = features["metadata.version"]["supported"]
    return version_warning(newest)


def version_warning(newest_metadata_version: int) -> str:
    """Return the warning by the highest `metadata.version` level that the broker supports."""
    if newest_metadata_version != _METADATA_4_3:
        return ""
    return (
        "the broker is Apache Kafka 4.3.x: restarted after a kill it can complete a transaction "
        "without its markers, so that aborted records come back and committed ones vanish; "
        "use 4.2.1. Reading drops doubled samples and `rlstreams audit` names lost ones."
    )
