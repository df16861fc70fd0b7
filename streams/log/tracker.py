"""Which records of a group's partitions are delivered, finished and committed.

Pure bookkeeping of one group member. Per partition it knows the position up to which everything
was delivered, the records that are delivered and not finished, and what was done before, from the
metadata of the last commit. Offsets below the position that no record occupies (transaction
markers, aborted records) count as done. See `done_set` for how it is written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from rlstreams.streams.log.bus import Polled
from rlstreams.streams.log.done_set import (
    MAX_SPAN,
    DoneSetError,
    decode_done,
    encode_done,
    note_of,
)
from rlstreams.streams.log.probing import Probing
from rlstreams.streams.log.record import Committed, Partition, RawRecord


class PartitionTracker:
    """One partition of one group member."""

    def __init__(self, committed: Committed) -> None:
        self._position = committed.offset
        self._open: dict[int, RawRecord] = {}  # by every offset of the record
        self.problem = ""  # of the predecessor's commit, which is taken as one without a done set
        try:
            self._done = set(decode_done(committed.offset, committed.metadata))  # from position on
        except DoneSetError as err:
            self._done, self.problem = set(), str(err)
        self._note = Probing.parse(note_of(committed.metadata))
        self.num_bytes = 0  # of the values of open records
        self.inherited = self._note  # as the predecessor left it, while its record is unfinished

    def deliver(self, record: RawRecord) -> bool:
        """Note a delivered record; False if it is done already, or is in work."""
        first = record.offsets[0]
        if first in self._done or first in self._open or first < self._position:
            return False
        if not self._open:
            # What lay between is no record: a marker, or done.
            self._note = _moved(self._note, first)
            self.inherited = _moved(self.inherited, first)
        if len(record.offsets) == 1:
            self._open[first] = record
        else:
            self._open.update(dict.fromkeys(record.offsets, record))
        self.num_bytes += len(record.value)
        return True

    def advance(self, position: int) -> None:
        """Everything below `position` was delivered."""
        if position > self._position:
            self._position = position
            self._done = {offset for offset in self._done if offset >= position}

    def after(
        self,
        finished: Iterable[RawRecord],
        note: Probing | None = None,
        *,
        on_probation: bool = False,
    ) -> Committed:
        """What to commit together with the outputs of `finished`.

        Args:
            note: to be written; None: the one there is, as long as its record is unfinished.
            on_probation: what comes next is noted as begun once.
        """
        gone = {offset for record in finished for offset in record.offsets}
        still = self._open.keys() - gone
        low = min(self._position, min(still, default=self._position))
        done = gone.union(self._done, range(low, self._position)) - still
        if gone and min(gone) < low:
            done = {offset for offset in done if offset >= low}
        if note is None:
            note = self._kept(self._note, gone) or (Probing(low, 1) if on_probation else None)
        return Committed(offset=low, metadata=encode_done(low, done, str(note or "")))

    def _kept(self, note: Probing | None, gone: Set[int] = frozenset()) -> Probing | None:
        """The note, unless its record is finished."""
        if note is None or note.offset in gone:
            return None
        is_ahead = note.offset >= self._position or note.offset in self._open
        return note if is_ahead else None

    def commit(self, finished: Iterable[RawRecord], *, on_probation: bool = False) -> None:
        """The commit of `after(finished)` is done."""
        for record in finished:
            self.num_bytes -= len(record.value)
            for offset in record.offsets:
                self._open.pop(offset, None)
                if offset >= self._position:
                    self._done.add(offset)
        self._note = self._kept(self._note) or (Probing(self.low, 1) if on_probation else None)
        self.inherited = self._kept(self.inherited)

    def note(self, note: Probing | None) -> None:
        """The commit of `after((), note)` is done."""
        self._note = note

    @property
    def is_noted(self) -> bool:
        """Whether the last commit carries a note of this member's."""
        return self._note != self.inherited

    def holds(self, record: RawRecord) -> bool:
        """Whether the record is delivered and not committed."""
        return self._open.get(record.offsets[0]) is record

    @property
    def low(self) -> int:
        """The low watermark: everything below is committed, or was nothing."""
        return min([self._position, *self._open])

    @property
    def position(self) -> int:
        """Everything below was delivered."""
        return self._position

    @property
    def span(self) -> int:
        """Offsets between the low watermark and the position."""
        return self._position - self.low

    @property
    def num_open(self) -> int:
        """Offsets delivered and not committed."""
        return len(self._open)


class Tracker:
    """All partitions of one group member."""

    def __init__(self) -> None:
        # A plain pair is equal to the partition of that name, and is made in half the time.
        self._partitions: dict[tuple[str, int], PartitionTracker] = {}
        self.on_probation = False  # what comes next is noted as begun once

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
            if (tracker := self._partitions.get(record.position[:2])) and tracker.deliver(record)
        ]
        for partition, position in positions.items():
            if partition in self._partitions:
                self._partitions[partition].advance(position)
        return new

    def after(self, finished: Iterable[RawRecord]) -> Mapping[Partition, Committed]:
        """What to commit, for each partition that `finished` touches."""
        return {
            p: self._partitions[p].after(records, on_probation=self.on_probation)
            for p, records in _by_partition(finished).items()
        }

    def commit(self, finished: Iterable[RawRecord]) -> None:
        """The commit of `after(finished)` is done."""
        for partition, records in _by_partition(finished).items():
            self._partitions[partition].commit(records, on_probation=self.on_probation)

    def with_notes(
        self, notes: Mapping[Partition, Probing | None]
    ) -> Mapping[Partition, Committed]:
        """What to commit for `notes` alone; None: no note."""
        found = {}
        for partition, note in notes.items():
            at = self._partitions[partition].after((), note, on_probation=False)
            text = at.metadata if note is not None else at.metadata.partition(" ")[0]
            found[partition] = Committed(offset=at.offset, metadata=text)
        return found

    def note(self, notes: Mapping[Partition, Probing | None]) -> None:
        """The commit of `with_notes(notes)` is done."""
        for partition, note in notes.items():
            self._partitions[partition].note(note)

    def inherited(self, partition: Partition) -> Probing | None:
        """The note that the predecessor had to leave there, while its record is unfinished."""
        return self._partitions[partition].inherited

    def problem(self, partition: Partition) -> str:
        """Why the metadata of its last commit could not be read; empty: it could."""
        return self._partitions[partition].problem

    def low(self, partition: Partition) -> int:
        """The low watermark of an assigned partition."""
        return self._partitions[partition].low

    def position(self, partition: Partition) -> int:
        """Everything below it was delivered."""
        return self._partitions[partition].position

    def holds(self, record: RawRecord) -> bool:
        """Whether the record is still ours to finish: not revoked, not committed."""
        tracker = self._partitions.get(record.position[:2])
        return tracker is not None and tracker.holds(record)

    def too_wide(self) -> frozenset[Partition]:
        """Partitions to pause: their done set would no longer fit into commit metadata."""
        return frozenset(Partition(*p) for p, t in self._partitions.items() if t.span > MAX_SPAN)

    @property
    def noted(self) -> frozenset[Partition]:
        """Partitions whose last commit carries a note of this member's."""
        return frozenset(Partition(*p) for p, t in self._partitions.items() if t.is_noted)

    @property
    def num_bytes(self) -> int:
        """Of the values of records delivered and not committed."""
        return sum(tracker.num_bytes for tracker in self._partitions.values())

    @property
    def partitions(self) -> frozenset[Partition]:
        """Partitions assigned."""
        return frozenset(Partition(*p) for p in self._partitions)


def _moved(note: Probing | None, first: int) -> Probing | None:
    """The note, about a record that starts at `first` or later."""
    if note is None or note.offset >= first:
        return note
    return Probing(first, note.tries)


def _by_partition(records: Iterable[RawRecord]) -> dict[Partition, list[RawRecord]]:
    found: dict[tuple[str, int], list[RawRecord]] = {}
    for record in records:
        topic, number, _ = record.position
        place = topic, number
        if place in found:
            found[place].append(record)
        else:
            found[place] = [record]
    return {Partition(*place): its for place, its in found.items()}
