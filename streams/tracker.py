"""Which records of a group's partitions are delivered, finished and committed.

Pure bookkeeping of one group member. Per partition it knows the position up to which everything
was delivered, the records that are delivered and not finished, and what was done before, from the
metadata of the last commit. Offsets below the position that no record occupies (transaction
markers, aborted records) count as done. See `done_set` for how it is written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streams.bus import Polled
from streams.done_set import MAX_SPAN, decode_done, encode_done
from streams.record import Committed, Partition, RawRecord


class PartitionTracker:
    """One partition of one group member."""

    def __init__(self, committed: Committed) -> None:
        self._position = committed.offset
        self._open: dict[int, RawRecord] = {}  # by every offset of the record
        self._done = set(decode_done(committed.offset, committed.metadata))  # at or above position

    def deliver(self, record: RawRecord) -> bool:
        """Note a delivered record; False if it is done already, or is in work."""
        first = record.offsets[0]
        if first in self._done or first in self._open or first < self._position:
            return False
        self._open.update(dict.fromkeys(record.offsets, record))
        return True

    def advance(self, position: int) -> None:
        """Everything below `position` was delivered."""
        if position > self._position:
            self._position = position
            self._done = {offset for offset in self._done if offset >= position}

    def after(self, finished: Iterable[RawRecord], note: str = "") -> Committed:
        """What to commit together with the outputs of `finished`."""
        gone = {offset for record in finished for offset in record.offsets}
        still = self._open.keys() - gone
        low = min(self._position, min(still, default=self._position))
        done = gone.union(self._done, range(low, self._position)) - still
        if gone and min(gone) < low:
            done = {offset for offset in done if offset >= low}
        return Committed(offset=low, metadata=encode_done(low, done, note))

    def commit(self, finished: Iterable[RawRecord]) -> None:
        """The commit of `after(finished)` is done."""
        for record in finished:
            for offset in record.offsets:
                self._open.pop(offset, None)
                if offset >= self._position:
                    self._done.add(offset)

    def holds(self, record: RawRecord) -> bool:
        """Whether the record is delivered and not committed."""
        return self._open.get(record.offsets[0]) is record

    @property
    def span(self) -> int:
        """Offsets between the low watermark and the position."""
        return self._position - min([self._position, *self._open])

    @property
    def num_open(self) -> int:
        """Offsets delivered and not committed."""
        return len(self._open)


class Tracker:
    """All partitions of one group member."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, PartitionTracker] = {}

    def take(self, polled: Polled, positions: Mapping[Partition, int]) -> list[RawRecord]:
        """Apply one poll in order; returns the records that are new work.

        Args:
            polled: what the poll brought.
            positions: the consumer's delivered positions after it.
        """
        for partition in polled.revoked:
            self._partitions.pop(partition, None)
        for partition, committed in polled.assigned.items():
            self._partitions[partition] = PartitionTracker(committed)
        new = [
            record
            for record in polled.records
            if record.partition in self._partitions
            and self._partitions[record.partition].deliver(record)
        ]
        for partition, position in positions.items():
            if partition in self._partitions:
                self._partitions[partition].advance(position)
        return new

    def after(self, finished: Iterable[RawRecord]) -> Mapping[Partition, Committed]:
        """What to commit, for each partition that `finished` touches."""
        return {p: self._partitions[p].after(rs) for p, rs in _by_partition(finished).items()}

    def commit(self, finished: Iterable[RawRecord]) -> None:
        """The commit of `after(finished)` is done."""
        for partition, records in _by_partition(finished).items():
            self._partitions[partition].commit(records)

    def holds(self, record: RawRecord) -> bool:
        """Whether the record is still ours to finish: not revoked, not committed."""
        tracker = self._partitions.get(record.partition)
        return tracker is not None and tracker.holds(record)

    def too_wide(self) -> frozenset[Partition]:
        """Partitions to pause: their done set would no longer fit into commit metadata."""
        return frozenset(p for p, t in self._partitions.items() if t.span > MAX_SPAN)

    @property
    def partitions(self) -> frozenset[Partition]:
        """Partitions assigned."""
        return frozenset(self._partitions)


def _by_partition(records: Iterable[RawRecord]) -> dict[Partition, list[RawRecord]]:
    found: dict[Partition, list[RawRecord]] = {}
    for record in records:
        found.setdefault(record.partition, []).append(record)
    return found
