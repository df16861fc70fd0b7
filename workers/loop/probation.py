"""How to find a record that kills workers: after crashes, start only a few records at a time.

Kafka cannot say how a partition's last owner ended, so each owner leaves a note in the commit
metadata (`rlstreams.streams.log.probing`) before it starts any record:

1. An owner notes 1 try at the low watermark of each partition that it takes over, works as usual,
   and drops the note with the first commit that advances the watermark. A clean exit removes it.
   So a kill in the middle of work costs nothing: the successor finds no note.
2. An owner that finds a note is the second to start at that record. It is on probation: it starts
   the first record of each such partition alone, and counts the try in the note before it does.
   A record counts as passed once it is committed, or after PATIENCE_S.
3. Then come 2, 4, 8, ... at a time, until as many were started as a worker holds at once: its
   predecessor's whole window. Commits meanwhile note 1 try at the new watermark, so that a crash
   among them continues here, with fewer suspects.
4. A record whose note says MAX_TRIES is not started again: it becomes a dead letter `kills_worker`,
   in one transaction with its offset.

So a poison record costs three crashes if it is the first one (four, if the first crash left no
note), and at most one more for each doubling of its distance from there. Pure; the clock is
passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlstreams.streams.log.record import Partition, RawRecord

MAX_TRIES = 3  # one among others, two alone
PATIENCE_S = 10.0


class Probation:
    """What one worker may begin.

    Args:
        window: records that a worker holds at once.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._tries: dict[Partition, int] = {}  # of its first record, as noted
        self._size = 0  # of the next round; 0: not on probation
        self._num_begun = 0
        self._round: Sequence[RawRecord] = ()
        self._since_s = 0.0

    @property
    def is_active(self) -> bool:
        """Whether records are taken a few at a time."""
        return self._size > 0

    @property
    def suspects(self) -> frozenset[Partition]:
        """Partitions whose first record is still to be begun alone."""
        return frozenset(self._tries)

    def suspect(self, partition: Partition, tries: int) -> None:
        """A partition was taken over with a note."""
        self._tries[partition] = tries
        self._size, self._num_begun = 1, 0

    def clear(self, partition: Partition) -> None:
        """Its first record is begun or buried."""
        self._tries.pop(partition, None)

    def give_up(self, partition: Partition) -> None:
        """It has no record to begin, or is no longer ours."""
        self._tries.pop(partition, None)
        if not self._tries and self._num_begun == 0:
            self._size = 0

    def tries(self, partition: Partition) -> int:
        """How often the first record of a suspect partition was begun; 0 for all others."""
        return self._tries.get(partition, 0)

    def eligible(self, waiting: Sequence[RawRecord]) -> Sequence[RawRecord]:
        """Those of the delivered records whose turn it is, in order."""
        if not self._tries:
            return waiting
        first: dict[Partition, RawRecord] = {}
        for raw in waiting:
            if raw.partition in self._tries:
                first.setdefault(raw.partition, raw)
        return list(first.values())

    def allowed(self, holds: Callable[[RawRecord], bool], now_s: float) -> int:
        """How many may be begun now.

        Args:
            holds: whether a record is still unfinished.
        """
        is_open = any(holds(raw) for raw in self._round)
        if is_open and now_s - self._since_s < PATIENCE_S:
            return 0
        return 1 if self._tries else self._size

    def begun(self, records: Sequence[RawRecord], now_s: float) -> None:
        """A round has begun; the next may be twice as large, or the probation is over."""
        self._round, self._since_s = records, now_s
        self._num_begun += len(records)
        if not self._tries:
            self._size = 2 * len(records) if self._num_begun < self._window else 0
