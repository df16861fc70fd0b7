"""Records read again by their recorded positions."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Partition, Position, RawRecord

POLL_BYTES = 64_000_000  # of one poll, about: a trajectory may have 50 MB


class RecordGoneError(Exception):
    """A recorded position holds no record: removed by retention, or the topic is another one."""


class PollSize:
    """Number of records to ask for, so that one poll brings about `budget_bytes` at most.

    The first poll asks for one; each may ask for twice as many as the one before, while so many of
    the largest record seen would fit.
    """

    MAX = 256

    def __init__(self, budget_bytes: int = POLL_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._largest_bytes = 1
        self.num_records = 1

    def saw(self, raws: Sequence[RawRecord]) -> None:
        """Take the sizes of the records of the last poll."""
        if raws:
            self._largest_bytes = max(self._largest_bytes, *(len(raw.value) for raw in raws))
            fitting = max(1, self._budget_bytes // self._largest_bytes)
            self.num_records = min(2 * self.num_records, fitting, self.MAX)


def fetch(
    bus: Bus,
    positions: Sequence[Position],
    *,
    deadline_s: float = 120.0,
    while_waiting: Callable[[int], None] = lambda _: None,
) -> list[RawRecord]:
    """The records at `positions`, in that order.

    Args:
        while_waiting: called after each poll with the number of its records, wanted or not: 0 is
            no progress.

    Raises:
        OffsetGoneError: below the beginning of the log; names the range that is there.
        RecordGoneError: the reader passed a position without finding its record.
        TimeoutError: nothing came for `deadline_s`; names the first missing one.
    """
    wanted: defaultdict[Partition, set[int]] = defaultdict(set)
    for topic, number, offset in positions:
        wanted[Partition(topic, number)].add(offset)
    found: dict[Position, RawRecord] = {}
    until = time.monotonic() + deadline_s
    size = PollSize()
    with bus.reader() as reader:
        # All partitions at once: to turn to another one, a client waits for its last request.
        reader.seek({partition: min(offsets) for partition, offsets in wanted.items()})
        while wanted:
            if time.monotonic() > until:
                partition, left = next(iter(wanted.items()))
                missing = Position(*partition, min(left))
                raise TimeoutError(f"{missing}: nothing was read for {deadline_s:g} s")
            raws = reader.poll(size.num_records, 0.1)
            size.saw(raws)
            for raw in raws:
                topic, number, offset = raw.position
                if offset in (left := wanted.get(Partition(topic, number), set())):
                    found[raw.position] = raw
                    left.remove(offset)
            if raws:
                until = time.monotonic() + deadline_s
            at = reader.positions()
            for partition in list(wanted):
                _check_passed(at[partition], partition, wanted[partition])
                if not wanted[partition]:
                    del wanted[partition]
            while_waiting(len(raws))
    return [found[position] for position in positions]


def _check_passed(at: int, partition: Partition, left: set[int]) -> None:
    for offset in left:
        if offset < at:
            raise RecordGoneError(
                f"{Position(*partition, offset)} holds no committed record; the reader is at {at}"
            )
