"""One topic of a run, read in stretches: each ends where the topic ended when that was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Batch, Partition
from rlstreams.streams.log.topic import Topic

# Many enough that what Python does once a batch is little for each record, and few enough for the
# processor's cache and for memory where records are large.
BATCH = 1_000
BATCH_BYTES = 16 << 20
_FIRST_BATCH = 16  # before the size of records is known
_GROWTH = 4  # at most, from one to the next: large records may follow small ones


class Tail(Closing):
    """A reader that remembers where it is.

    Args:
        beginnings: where each partition begins.
        deadline_s: longest wait for the next record below a known end.
    """

    def __init__(
        self, bus: Bus, topic: Topic, beginnings: Mapping[Partition, int], deadline_s: float
    ) -> None:
        self._beginnings = dict(beginnings)
        self._reader = bus.reader(self._beginnings)
        self._name = topic.name
        self._deadline_s = deadline_s
        self._ahead: list[Batch] = []  # delivered, but beyond the stretch
        self._num_wanted = _FIRST_BATCH

    def up_to(self, ends: Mapping[Partition, int]) -> Iterator[Sequence[Batch]]:
        """The records below `ends` that no earlier stretch had, some batches at a time.

        Raises:
            DeadlineError: a partition did not deliver up to its end; names it.
        """
        waiting, self._ahead = self._ahead, []
        yield self._below(ends, waiting)
        last_progress = time.monotonic()
        at = self._positions()
        while behind := {partition for partition, end in ends.items() if at(partition) < end}:
            batches = self._reader.poll_batches(self._num_wanted, 0.2)
            before, at = at, self._positions()
            self._weigh(batches)
            yield self._below(ends, batches)
            if batches or any(at(partition) != before(partition) for partition in behind):
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self._deadline_s:
                where = [f"{p} is at {at(p)} of {ends[p]}" for p in sorted(behind)]
                raise DeadlineError(
                    f"audit: {', '.join(where)}: nothing delivered for {self._deadline_s:g} s"
                )

    def _weigh(self, batches: Sequence[Batch]) -> None:
        """The next time brings as many as records of this size allow."""
        num_records = sum(len(values) for _, _, values, _ in batches)
        if num_records:
            num_bytes = sum(sum(map(len, values)) for _, _, values, _ in batches)
            room = BATCH_BYTES * num_records // max(1, num_bytes)
            self._num_wanted = max(1, min(BATCH, _GROWTH * self._num_wanted, room))

    def _below(self, ends: Mapping[Partition, int], batches: Sequence[Batch]) -> Sequence[Batch]:
        below = []
        for batch in batches:
            end = ends.get(batch.partition, 0)
            if max(batch.offsets) < end:
                below.append(batch)
                continue
            inside = [index for index, offset in enumerate(batch.offsets) if offset < end]
            beyond = [index for index, offset in enumerate(batch.offsets) if offset >= end]
            below += [batch.only(inside)] if inside else []
            self._ahead.append(batch.only(beyond))
        return below

    def _positions(self) -> Callable[[Partition], int]:
        """Where each partition is now."""
        at, beginnings = self._reader.positions(), self._beginnings
        return lambda partition: at.get(partition, beginnings.get(partition, 0))

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
