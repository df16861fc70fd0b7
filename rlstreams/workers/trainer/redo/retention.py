"""Retention of the records that redo needs, those of the steps since the newest checkpoint.

Pure. Retention removes whole segments from a partition's beginning, by the age of their newest
record and by the bytes above them. So the oldest record that redo needs is the one to watch, and a
new checkpoint releases it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


class RedoSpan:
    """Records that a redo from the newest checkpoint would read: their oldest, and their size.

    Args:
        settings: of the topic, as Kafka has them: -1 is no limit.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._limit_ms = int(settings.get("retention.ms", "-1"))
        self._limit_bytes = int(settings.get("retention.bytes", "-1"))
        self._oldest: dict[Partition, tuple[int, int]] = {}  # offset, timestamp in ms
        self._num_bytes = 0
        self._num_offsets = 0

    def add(self, raws: Iterable[RawRecord]) -> None:
        """Add the records of a step."""
        for raw in raws:
            self._num_bytes += len(raw.value)
            self._num_offsets += len(raw.offsets)
            own = (raw.position.offset, raw.timestamp_ms)
            self._oldest[raw.partition] = min(own, self._oldest.get(raw.partition, own))

    def clear(self) -> None:
        """Forget the records of steps that a checkpoint holds; the mean size of a record stays."""
        self._oldest = {}

    def why_save(self, ends: Mapping[Partition, int], now_ms: int) -> str:
        """Reason to write a checkpoint now: a record has used half of its retention; "": none.

        Args:
            ends: next offset to be written, or that a reader without lag reads next, by partition.
        """
        for partition, (offset, timestamp_ms) in sorted(self._oldest.items()):
            name = f"{partition}@{offset}"
            age_ms = now_ms - timestamp_ms
            if 0 <= self._limit_ms <= 2 * age_ms:
                return f"{name} is {age_ms / 1000:.0f} s old of {self._limit_ms / 1000:.0f} s"
            num_above = ends.get(partition, offset) - offset
            above = num_above * self._num_bytes / self._num_offsets
            if 0 <= self._limit_bytes <= 2 * above:
                return f"about {above:.0f} bytes lie above {name} of {self._limit_bytes}"
        return ""


def check_redo(
    facts: Sequence[StepFact], beginnings: Mapping[Partition, int], checkpoint: str
) -> None:
    """Refuse to begin a redo whose records are gone.

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
    """Refuse to go on if samples that wait for a step are gone.

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
