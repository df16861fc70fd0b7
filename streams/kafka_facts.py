"""What a broker says of itself and of a run's topics. Looks only; uses kafka-python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafka.admin import ConfigResource, KafkaAdminClient

from streams.admin import connected
from streams.topics import TOPICS

_BROKER_SETTINGS = (
    "group.consumer.session.timeout.ms",
    "transaction.max.timeout.ms",
    "message.max.bytes",
)
_TOPIC_SETTINGS = ("retention.ms", "retention.bytes", "cleanup.policy")
# The highest `metadata.version` of a release (org.apache.kafka.server.common.MetadataVersion).
_RELEASES = {21: "3.9", 25: "4.0", 27: "4.1", 29: "4.2", 30: "4.3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """A topic as the broker has it."""

    partitions: int
    settings: Mapping[str, str]  # `retention.ms`, `retention.bytes`, `cleanup.policy`


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFacts:
    """A cluster as it describes itself."""

    num_brokers: int
    metadata_version: int  # highest level that it supports; 0: it does not say
    features: Mapping[str, int]  # levels in force
    settings: Mapping[str, int]  # of the first broker; without what it does not know
    topics: Mapping[str, TopicFacts]  # of the run, by their names in the table

    @property
    def release(self) -> str:
        """Of Apache Kafka, as far as the level tells."""
        level = self.metadata_version
        known = [release for newest, release in sorted(_RELEASES.items()) if newest >= level > 0]
        return known[0] if known else f"unknown (metadata.version {level})"


def broker_facts(bootstrap: str, run: str) -> BrokerFacts:
    """Ask the broker.

    Raises:
        BrokerError: it cannot be reached, or refused.
    """
    with connected(bootstrap) as admin:
        features = admin.describe_features()
        brokers = admin.describe_cluster()["brokers"]
        first = str(brokers[0]["broker_id"])
        settings = _settings(admin, "BROKER", [first], _BROKER_SETTINGS)[first]
        return BrokerFacts(
            num_brokers=len(brokers),
            metadata_version=int(features.get("metadata.version", {}).get("supported", (0, 0))[1]),
            features={
                name: int(levels["finalized"][1])
                for name, levels in features.items()
                if "finalized" in levels
            },
            settings={name: int(value) for name, value in settings.items()},
            topics=_topics(admin, run),
        )


def _topics(admin: KafkaAdminClient, run: str) -> dict[str, TopicFacts]:
    names = {f"{run}.{topic.name}": topic.name for topic in TOPICS}
    counts = {
        topic["name"]: len(topic["partitions"])
        for topic in admin.describe_topics(list(names))
        if topic["partitions"]
    }
    settings = _settings(admin, "TOPIC", list(counts), _TOPIC_SETTINGS) if counts else {}
    return {
        names[name]: TopicFacts(partitions=count, settings=settings[name])
        for name, count in counts.items()
    }


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
