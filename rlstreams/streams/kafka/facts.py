"""Facts about a broker and a run's topics. Read-only; uses kafka-python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka.admin import ConfigResource, KafkaAdminClient

from rlstreams.streams.kafka.admin_ask import asked
from rlstreams.streams.log.topic_plan import FLUSH
from rlstreams.streams.log.topics import TOPICS

_BROKER_SETTINGS = (
    "group.consumer.session.timeout.ms",
    "transaction.max.timeout.ms",
    "message.max.bytes",
)
_TOPIC_SETTINGS = (
    "retention.ms",
    "retention.bytes",
    "cleanup.policy",
    "min.insync.replicas",
    FLUSH,
)
# The highest `metadata.version` of a release (org.apache.kafka.server.common.MetadataVersion).
_RELEASES = {21: "3.9", 25: "4.0", 27: "4.1", 29: "4.2", 30: "4.3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The nodes that hold a partition."""

    assigned: tuple[int, ...]
    in_sync: tuple[int, ...]  # nodes that have every acknowledged record


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """A topic as the broker has it."""

    partitions: int
    settings: Mapping[str, str]  # those of `_TOPIC_SETTINGS` that the topic has
    copies: Mapping[int, Replicas] = field(default_factory=dict)  # by partition


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFacts:
    """A cluster as it describes itself."""

    brokers: frozenset[int]  # nodes that are alive
    metadata_version: int  # highest level that it supports; 0: not reported
    features: Mapping[str, int]  # levels in force
    settings: Mapping[str, int]  # of the first broker; without settings that it does not know
    topics: Mapping[str, TopicFacts]  # of the run, by their names in the table
    disk_free_bytes: int = -1  # of the fullest log folder; -1: the broker does not say
    fenced: frozenset[int] = frozenset()  # nodes that the cluster knows and that do not respond

    @property
    def assigned(self) -> frozenset[int]:
        """Nodes that hold copies of the run's topics, or should."""
        every = (copies for topic in self.topics.values() for copies in topic.copies.values())
        return frozenset(node for copies in every for node in copies.assigned)

    @property
    def num_brokers(self) -> int:
        """Number of nodes that are alive."""
        return len(self.brokers)

    @property
    def release(self) -> str:
        """Release of Apache Kafka, by its metadata level."""
        level = self.metadata_version
        known = [release for newest, release in sorted(_RELEASES.items()) if newest >= level > 0]
        return known[0] if known else f"unknown (metadata.version {level})"


def broker_facts(bootstrap: str, run: str, options: Mapping[str, str]) -> BrokerFacts:
    """Ask the broker for its facts.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    return asked(bootstrap, options, lambda admin: _facts(admin, run))


def _facts(admin: KafkaAdminClient, run: str) -> BrokerFacts:
    features = admin.describe_features()
    known = admin.describe_cluster()["brokers"]
    fenced = frozenset(int(broker["broker_id"]) for broker in known if broker.get("is_fenced"))
    brokers = frozenset(int(broker["broker_id"]) for broker in known) - fenced
    first = str(min(brokers))
    settings = _settings(admin, "BROKER", [first], _BROKER_SETTINGS)[first]
    return BrokerFacts(
        brokers=brokers,
        fenced=fenced,
        metadata_version=int(features.get("metadata.version", {}).get("supported", (0, 0))[1]),
        features={
            name: int(levels["finalized"][1])
            for name, levels in features.items()
            if "finalized" in levels
        },
        settings={name: int(value) for name, value in settings.items()},
        topics=topics_of(admin, run),
        disk_free_bytes=_disk_free(admin),
    )


def topics_of(admin: KafkaAdminClient, run: str) -> dict[str, TopicFacts]:
    """Return the existing topics of the run, by their names in the table."""
    names = {f"{run}.{topic.name}": topic.name for topic in TOPICS}
    found = {
        topic["name"]: {
            part["partition_index"]: Replicas(
                assigned=tuple(part["replica_nodes"]), in_sync=tuple(part["isr_nodes"])
            )
            for part in topic["partitions"]
        }
        for topic in admin.describe_topics(list(names))
        if topic["partitions"]
    }
    counts = {name: len(copies) for name, copies in found.items()}
    if not counts:
        return {}
    settings = _settings(admin, "TOPIC", list(counts), _TOPIC_SETTINGS)
    return {
        names[name]: TopicFacts(
            partitions=count,
            settings=settings[name],
            copies=found[name],
        )
        for name, count in counts.items()
    }


def _disk_free(admin: KafkaAdminClient) -> int:
    every = [folder for broker in admin.describe_log_dirs() for folder in broker["log_dirs"]]
    return min((int(folder.get("usable_bytes", -1)) for folder in every), default=-1)


def _settings(
    admin: KafkaAdminClient, kind: str, names: list[str], wanted: tuple[str, ...]
) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(kind, name, dict.fromkeys(wanted)) for name in names]
    found = admin.describe_configs(resources, config_filter="all")[kind.lower()]
    return {
        name: {
            key: str(setting["value"])
            for key, setting in found[name].items()
            if setting["value"] is not None
        }
        for name in names
    }
