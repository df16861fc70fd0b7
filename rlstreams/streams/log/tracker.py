"""Bookkeeping of a group's records: delivered, finished and committed.

Pure, for one group member. Per partition it knows the position up to which everything was
delivered, the records that are delivered and not finished, and those done before, from the metadata
of the last commit. Offsets below the position that no record occupies (transaction markers, aborted
records) count as done. It also keeps the tries of the oldest open record (decision 0026).
`done_set` has the format of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType

from rlstreams.streams.log.bus import Polled
from rlstreams.streams.log.done_set import (
    MAX_SPAN,
    DoneSetError,
    decode_done,
    encode_done,
    tries_of,
)
from rlstreams.streams.log.record import Committed, Partition, RawRecord

ISOLATING_TRIES = 2  # dead owners in a row, from which on records are begun one at a time
MAX_TRIES = 3  # tries after which a record is not begun again


class PartitionTracker:
    """One partition of one group member."""

    def __init__(self, committed: Committed) -> None:
        self._position = committed.offset
        self._open: dict[int, RawRecord] = {}  # by every offset of the record
        self.problem = ""  # error in the predecessor's done set, which then counts as empty
        try:
            self._done = set(decode_done(committed.offset, committed.metadata))  # from position on
        except DoneSetError as err:
            self._done, self.problem = set(), str(err)
        self.num_bytes = 0  # of the values of open records
        # Owners that began the oldest open record: those before us, and those in the last commit.
        self.inherited = self.tries = tries_of(committed.metadata)
        self.is_noted = False  # our own try is committed
        self.is_isolated = self.tries >= ISOLATING_TRIES

    def deliver(self, record: RawRecord) -> bool:
        """Note a delivered record; return False if it is done already, or in work."""
        first = record.offsets[0]
        if first in self._done or first in self._open or first < self._position:
            return False
        self._open.update(dict.fromkeys(record.offsets, record))
        self.num_bytes += len(record.value)
        return True

    def advance(self, position: int) -> None:
        """Note that everything below `position` was delivered."""
        if position > self._position:
            self._position = position
            self._done = {offset for offset in self._done if offset >= position}

    def after(self, finished: Iterable[RawRecord] = (), tries: int | None = None) -> Committed:
        """Return the position to commit with outputs of `finished`; by default with our tries."""
        gone = {offset for record in finished for offset in record.offsets}
        still = self._open.keys() - gone
        low = min(self._position, min(still, default=self._position))
        done = gone.union(self._done, range(low, self._position)) - still
        if gone and min(gone) < low:
            done = {offset for offset in done if offset >= low}
        if tries is None:
            tries = self._tries_after(gone)
        return Committed(offset=low, metadata=encode_done(low, done, tries))

    def commit(self, finished: Iterable[RawRecord]) -> None:
        """Note that the commit of `after(finished)` is done."""
        finished = list(finished)
        gone = {offset for record in finished for offset in record.offsets}
        if self._is_past(gone):
            self.tries = self._tries_after(gone)
            self.inherited = min(self.tries, ISOLATING_TRIES - 1)
            self.is_noted = self.tries != self.inherited or not self.is_isolated
        for record in finished:
            self.num_bytes -= len(record.value)
        for offset in gone:
            self._open.pop(offset, None)
            if offset >= self._position:
                self._done.add(offset)

    def note(self) -> None:
        """Note that the commit of `after((), inherited + 1)` is done: the record may begin."""
        self.tries, self.is_noted = self.inherited + 1, True

    def progress(self) -> None:
        """Note that the commit of `after((), 0)` is done: the owners' work made progress."""
        self.inherited = self.tries = 0
        self.is_isolated = False

    def _is_past(self, gone: Set[int]) -> bool:
        return bool(self._open) and min(self._open) in gone

    def _tries_after(self, gone: Set[int]) -> int:
        """Return the tries once records are gone; in isolation the next record's is noted too."""
        if not self._is_past(gone):
            return self.tries
        if not self.is_isolated:
            return 0
        return ISOLATING_TRIES if self._open.keys() - gone else ISOLATING_TRIES - 1

    def holds(self, record: RawRecord) -> bool:
        """Whether the record is delivered and not committed."""
        return self._open.get(record.offsets[0]) is record

    @property
    def span(self) -> int:
        """Offsets between the low watermark and the position."""
        return self._position - min([self._position, *self._open])


class Tracker:
    """All partitions of one group member."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, PartitionTracker] = {}

    def __getitem__(self, partition: Partition) -> PartitionTracker:
        """Return the tracker of an assigned partition."""
        return self._partitions[partition]

    def __len__(self) -> int:
        """Number of assigned partitions."""
        return len(self._partitions)

    def take(self, polled: Polled, positions: Mapping[Partition, int]) -> list[RawRecord]:
        """Apply one poll in order; return the records that are new work.

        Args:
            polled: the poll's result.
            positions: the consumer's delivered positions after it.
        """
        for partition in polled.revoked:
            self._partitions.pop(partition, None)
        for partition, committed in polled.assigned.items():
            self._partitions[partition] = PartitionTracker(committed)
        new = [
            record
            for record in polled.records
            if (tracker := self._partitions.get(record.partition)) and tracker.deliver(record)
        ]
        for partition, position in positions.items():
            if partition in self._partitions:
                self._partitions[partition].advance(position)
        return new

    def after(
        self,
        finished: Iterable[RawRecord],
        begun: Iterable[Partition] = (),
        held: Mapping[Partition, bool] = MappingProxyType({}),
    ) -> Mapping[Partition, Committed]:
        """Return the positions to commit, for each partition that the arguments name.

        Args:
            begun: partitions whose oldest record begins next; that counts as our try.
            held: partitions whose position is committed unchanged, which only their owner can do;
                True: their work made progress, so earlier owners' tries no longer count.
        """
        positions = {
            partition: self._partitions[partition].after((), 0 if is_progress else None)
            for partition, is_progress in held.items()
        }
        for partition in begun:
            tracker = self._partitions[partition]
            positions[partition] = tracker.after((), tracker.inherited + 1)
        for partition, records in _by_partition(finished).items():
            positions[partition] = self._partitions[partition].after(records)
        return positions

    def commit(
        self,
        finished: Iterable[RawRecord],
        begun: Iterable[Partition] = (),
        held: Mapping[Partition, bool] = MappingProxyType({}),
    ) -> None:
        """Note that the commit of `after(finished, begun, held)` is done."""
        for partition in (p for p, is_progress in held.items() if is_progress):
            self._partitions[partition].progress()
        for partition in begun:
            self._partitions[partition].note()
        for partition, records in _by_partition(finished).items():
            self._partitions[partition].commit(records)

    def without_our_tries(self, partitions: Set[Partition] | None) -> Mapping[Partition, Committed]:
        """Return the positions to commit where this member leaves partitions alive; None: all."""
        return {
            p: t.after((), t.inherited)
            for p, t in self._partitions.items()
            if t.tries != t.inherited and (partitions is None or p in partitions)
        }

    def holds(self, record: RawRecord) -> bool:
        """Whether the record is still ours to finish: not revoked, not committed."""
        tracker = self._partitions.get(record.partition)
        return tracker is not None and tracker.holds(record)

    def end_isolation(self) -> None:
        """End isolation, as the dead owners' window is passed; partitions not yet begun stay."""
        for tracker in self._partitions.values():
            tracker.is_isolated &= not tracker.is_noted

    def too_wide(self) -> frozenset[Partition]:
        """Return partitions to pause: their done set would no longer fit into commit metadata."""
        return frozenset(p for p, t in self._partitions.items() if t.span > MAX_SPAN)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values of records delivered and not committed."""
        return sum(tracker.num_bytes for tracker in self._partitions.values())


def _by_partition(records: Iterable[RawRecord]) -> dict[Partition, list[RawRecord]]:
    found: dict[Partition, list[RawRecord]] = {}
    for record in records:
        found.setdefault(record.partition, []).append(record)
    return found
