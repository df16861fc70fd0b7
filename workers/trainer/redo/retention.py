"""Redo needs the records of the steps since the newest checkpoint: are they there, and until when?

Pure. Retention takes whole segments from a partition's beginning, by the age of their newest
record and by the bytes above them. So the oldest record that redo needs is the one to watch, and a
new checkpoint releases it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlstreams.schemas.events import PartitionPosition
from rlstreams.streams.ledger import StepFact
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import SCORED

_ADVICE = (
    "the run cannot go on from its log: put a newer checkpoint back into its folder, or begin "
    "another run.id; for the next one lengthen broker.payload_retention_hours and "
    "broker.payload_retention_bytes, or lower trainer.checkpoint_every"
)
_DROP = (
    "go on without the groups that were open: --trainer.on_expired=drop; or put the records back. "
    "For later lengthen broker.payload_retention_hours and broker.payload_retention_bytes"
)


class RetentionError(ConfigError):
    """Retention removed records that are needed; names step, partition and both offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A topic's retention, per partition; None: none."""

    retention_ms: int | None
    retention_bytes: int | None

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Limits:
        """From Kafka's topic configuration, where -1 is no limit."""
        return cls(
            retention_ms=_limit(settings.get("retention.ms", "-1")),
            retention_bytes=_limit(settings.get("retention.bytes", "-1")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Oldest:
    """The oldest record of a partition that redo needs."""

    offset: int
    timestamp_ms: int


class RedoSpan:
    """What a redo from the newest checkpoint would read, as far as retention minds."""

    def __init__(self) -> None:
        self.oldest: dict[Partition, Oldest] = {}
        self._num_bytes = 0
        self._num_offsets = 0

    def add(self, raws: Iterable[RawRecord]) -> None:
        """A step used these."""
        for raw in raws:
            self._num_bytes += len(raw.value)
            self._num_offsets += len(raw.offsets)
            known = self.oldest.get(raw.partition)
            if known is None or raw.position.offset < known.offset:
                self.oldest[raw.partition] = Oldest(
                    offset=raw.position.offset, timestamp_ms=raw.timestamp_ms
                )

    def clear(self) -> None:
        """A checkpoint holds the newest step."""
        self.oldest = {}

    @property
    def bytes_per_offset(self) -> float:
        """Mean size of what lies at one offset (a record, or a part of a large one)."""
        return self._num_bytes / self._num_offsets if self._num_offsets else 0.0


def needs_checkpoint(
    oldest: Mapping[Partition, Oldest],
    ends: Mapping[Partition, int],
    bytes_per_offset: float,
    limits: Limits,
    now_ms: int,
) -> str:
    """Why to write a checkpoint now, or "": a record has used half of its retention.

    Args:
        ends: next offset to be written, or to be read by who keeps up, by partition.
    """
    for partition, record in sorted(oldest.items()):
        name = f"{partition}@{record.offset}"
        age_ms = now_ms - record.timestamp_ms
        if limits.retention_ms is not None and 2 * age_ms >= limits.retention_ms:
            return f"{name} is {age_ms / 1000:.0f} s old of {limits.retention_ms / 1000:.0f} s"
        above = (ends.get(partition, record.offset) - record.offset) * bytes_per_offset
        if limits.retention_bytes is not None and 2 * above >= limits.retention_bytes:
            return f"about {above:.0f} bytes lie above {name} of {limits.retention_bytes}"
    return ""


def check_redo(
    facts: Sequence[StepFact], beginnings: Mapping[Partition, int], checkpoint: str
) -> None:
    """Refuse to begin a redo that will not find its records.

    Args:
        facts: the steps to do again.
        beginnings: first offset kept, by partition of scored-trajectories.
        checkpoint: the one that redo begins from, for the message.

    Raises:
        RetentionError: a record of a step is gone.
    """
    for fact in facts:
        for number, offset in sorted(fact.oldest.items()):
            partition = Partition(SCORED.name, number)
            first = beginnings.get(partition, 0)
            if offset < first:
                raise RetentionError(
                    f"step {fact.step} cannot be done again: it needs {partition}@{offset}, the "
                    f"first record kept is {first}; redo begins from {checkpoint}; {_ADVICE}"
                )


def check_open(
    recorded: Iterable[PartitionPosition], beginnings: Mapping[Partition, int], step: int
) -> None:
    """Refuse to go on without samples that wait for a step.

    Args:
        recorded: lowest offset to read again, by partition, as the newest step has it.

    Raises:
        RetentionError: a record that was not trained on yet is gone.
    """
    for position in recorded:
        partition = Partition(position.topic, position.partition)
        first = beginnings.get(partition, 0)
        if position.offset < first:
            raise RetentionError(
                f"samples may be lost: after step {step} all from {partition}@{position.offset} "
                f"on was still to be trained, the first record kept is {first}; {_DROP}"
            )


def _limit(text: str) -> int | None:
    return int(text) if int(text) >= 0 else None
