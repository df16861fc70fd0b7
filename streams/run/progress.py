"""A bus that says how far its readers are, for who waits in front of a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.bus import Closing, Reader
from rlstreams.streams.log.record import Partition, RawRecord

SAY_EVERY_S = 0.5


class TalkingBus(KafkaBus):
    """Its readers say how far they are."""

    def __init__(
        self, bootstrap: str, run: str, options: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        super().__init__(bootstrap, run, options=options)
        self.say = say

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> Reader:  # type: ignore[override]
        """See `Bus`."""
        reader = _TalkingReader(super().reader(), self)
        if offsets:
            reader.seek(offsets)
        return reader


class _TalkingReader(Closing):
    """The port `Reader`; says twice a second what share of the records there it has delivered."""

    def __init__(self, reader: Reader, bus: TalkingBus) -> None:
        self._reader, self._bus = reader, bus
        self._starts: Mapping[Partition, int] = {}
        self._ends: Mapping[Partition, int] = {}  # asked for when there is something to say
        self._due_s = time.monotonic() + SAY_EVERY_S

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """See `Reader`."""
        self._say()
        return self._reader.poll(max_records, timeout_s)

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """See `Reader`."""
        self._reader.seek(offsets)
        self._starts, self._ends = dict(offsets), {}

    def positions(self) -> Mapping[Partition, int]:
        """See `Reader`."""
        return self._reader.positions()

    def close(self) -> None:
        """See `Reader`."""
        self._reader.close()

    def _say(self) -> None:
        if time.monotonic() < self._due_s or not self._starts:
            return
        topics = sorted({partition.topic for partition in self._starts})
        if not self._ends:
            self._ends = {p: end for topic in topics for p, end in self._bus.ends(topic).items()}
        begun = sum(self._starts.values())
        total = sum(self._ends.get(p, 0) for p in self._starts) - begun
        at = self._reader.positions()
        num_read = sum(at.get(p, start) for p, start in self._starts.items()) - begun
        names = topics[0] if len(topics) == 1 else f"{len(topics)} topics"
        self._bus.say(f"reading {names}: {num_read:,} of {total:,} records" * (num_read < total))
        self._due_s = time.monotonic() + SAY_EVERY_S
