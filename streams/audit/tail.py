"""One topic of a run, read in stretches: each ends where the topic ended when that was asked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topic import Topic

BATCH = 100  # records of a poll; few enough for memory where each has megabytes


class Tail(Closing):
    """A reader that remembers where it is.

    Args:
        beginnings: where each partition begins.
        deadline_s: longest wait for the next record below a known end.
    """

    def __init__(
        self, bus: Bus, topic: Topic, beginnings: Mapping[Partition, int], deadline_s: float
    ) -> None:
        self.topic = topic
        self._beginnings = dict(beginnings)
        self._reader = bus.reader(self._beginnings)
        self._deadline_s = deadline_s
        self._ahead: list[RawRecord] = []  # delivered, but beyond the stretch

    def up_to(self, ends: Mapping[Partition, int]) -> Iterator[RawRecord]:
        """The records below `ends` that no earlier stretch had.

        Raises:
            DeadlineError: a partition did not deliver up to its end; names it.
        """
        waiting, self._ahead = self._ahead, []
        yield from self._below(ends, waiting)
        at = self._positions()
        last_progress = time.monotonic()
        while behind := [partition for partition, end in ends.items() if at[partition] < end]:
            records = self._reader.poll(BATCH, 0.2)
            yield from self._below(ends, records)
            before, at = at, self._positions()
            if records or any(at[partition] != before[partition] for partition in behind):
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self._deadline_s:
                where = [f"{p} is at {at[p]} of {ends[p]}" for p in sorted(behind)]
                raise DeadlineError(
                    f"audit: {', '.join(where)}: nothing delivered for {self._deadline_s:g} s"
                )

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _below(
        self, ends: Mapping[Partition, int], records: Iterable[RawRecord]
    ) -> Iterator[RawRecord]:
        for raw in records:
            if raw.position.offset < ends.get(raw.partition, 0):
                yield raw
            else:
                self._ahead.append(raw)

    def _positions(self) -> Mapping[Partition, int]:
        """Where each partition is now."""
        return {**self._beginnings, **self._reader.positions()}
