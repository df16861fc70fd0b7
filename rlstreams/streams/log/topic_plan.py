"""Partition counts and settings of each topic of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlstreams.streams.log.topics import (
    CALLS,
    OUTCOMES,
    PROMPTS,
    SCORED,
    TOPICS,
    TRAJECTORIES,
    Retention,
    Topic,
)

# Topics partitioned alike: a prompt with its session's records, a trajectory with its score.
_ALIKE = ((PROMPTS, CALLS, OUTCOMES), (TRAJECTORIES, SCORED))
# By role, the topic whose partitions its workers share.
SHARED = {"rollout": PROMPTS, "logprob": TRAJECTORIES}
_DAY_MS = 24 * 3600 * 1000
FLUSH = "flush.messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """Partition counts and settings that the table of topics leaves open, by a run's workers."""

    rollout_workers: int
    logprob_workers: int
    partitions_per_worker: int = 2
    headroom: int = 1  # fewest partitions of each payload topic, for workers that come later
    replication: int = 1
    payload_ms: int = 7 * _DAY_MS
    payload_bytes: int = 16 * 1024**3  # per partition; -1: no bound
    short_ms: int = _DAY_MS
    fsync: bool = False  # every batch is on disk before it is acknowledged

    def partitions(self, topic: Topic) -> int:
        """Return the number of partitions of a topic in a new run.

        `prompts` gets at least two per rollout worker, so that a straggler that pauses one of
        them does not stop its worker.
        """
        if topic in _ALIKE[0]:
            planned = max(2, self.partitions_per_worker) * self.rollout_workers
            return max(planned, self.headroom)
        if topic in _ALIKE[1]:
            return max(self.partitions_per_worker * self.logprob_workers, self.headroom)
        assert topic.single_partition, f"no rule for the partitions of {topic.name}"
        return 1

    def beside(self, found: Mapping[str, int]) -> dict[Topic, int]:
        """Return the partitions of every topic of a run that exists.

        Counts never change, whatever the plan; a missing topic gets the count of the topics that
        are partitioned like it.

        Args:
            found: partitions of existing topics, by their names in the table.
        """
        counts = {topic: self.partitions(topic) for topic in TOPICS}
        for alike in _ALIKE:
            if (there := next((t for t in alike if t.name in found), None)) is not None:
                counts |= dict.fromkeys(alike, found[there.name])
        return counts

    def problems(self, run: str, found: Mapping[str, int]) -> list[str]:
        """Return why this plan does not fit a run: topics that should be partitioned alike and are
        not, or fewer partitions than workers that read them. Arguments as of `beside`."""
        counts = self.beside(found)
        wrong = [
            f"{run}.{topic.name} has {found[topic.name]} partitions and not {count}"
            for topic, count in counts.items()
            if found.get(topic.name, count) != count
        ]
        workers = {"rollout": self.rollout_workers, "logprob": self.logprob_workers}
        return wrong + [
            f"{run}.{topic.name} has {counts[topic]} partitions and {role}.workers is "
            f"{workers[role]}: {workers[role] - counts[topic]} of them would get no work"
            for role, topic in SHARED.items()
            if topic.name in found and counts[topic] < workers[role]
        ]

    def settings(self, topic: Topic) -> dict[str, str]:
        """Return a topic's configuration in Kafka; other settings keep the broker's default."""
        # Two of three: an acknowledged record outlives the loss of any one broker.
        durable = {"min.insync.replicas": "2"} if self.replication >= 3 else {}
        # After every message the log is forced to disk, before its append returns.
        forced = {FLUSH: "1"} if self.fsync else {}
        return {**self._retention(topic.retention), **durable, **forced}

    def _retention(self, retention: Retention) -> dict[str, str]:
        match retention:
            case Retention.LONG:
                return {"retention.ms": "-1", "retention.bytes": "-1"}
            case Retention.PAYLOAD:
                limits = {"retention.ms": self.payload_ms, "retention.bytes": self.payload_bytes}
                return {name: str(value) for name, value in limits.items()}
            case Retention.SHORT:
                return {"retention.ms": str(self.short_ms)}
            case Retention.COMPACT:
                return {"cleanup.policy": "compact"}

    def strengthened(self, topic: Topic, found: Mapping[str, str]) -> dict[str, str]:
        """Return settings of an existing topic that the plan makes stronger: forced writes, and
        farther bounds of payloads; -1 is no bound.

        Never a nearer bound: an operator may have lengthened it, and shortening removes records.
        """
        bounds = self._retention(topic.retention) if topic.retention is Retention.PAYLOAD else {}
        farther = {
            name: wanted
            for name, wanted in bounds.items()
            if _reach(wanted) > _reach(found.get(name, "-1"))
        }
        return farther | ({FLUSH: "1"} if self.fsync and found.get(FLUSH) != "1" else {})

    def made(self, topic: Topic, partitions: int) -> dict[str, object]:
        """Return the topic's arguments for an administration client."""
        return {
            "num_partitions": partitions,
            "replication_factor": self.replication,
            "configs": self.settings(topic),
        }


def _reach(bound: str) -> float:
    return float("inf") if int(bound) < 0 else int(bound)
