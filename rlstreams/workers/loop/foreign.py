"""Events of topics that each reader reads without a group, and the records there that are none.

In a topic whose records are handled one by one, such a record becomes a dead letter, committed with
its offset. `steps`, `policy-versions`, `control` and the like have many readers and no offset to
commit: there it has no effect, and each reader names it in its log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from rlstreams.schemas import DecodeError, SchemaTexts
from rlstreams.schemas.events import Event
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.read_to import DELIVERY_S, read_to
from rlstreams.streams.log.record import Partition, RawRecord, Record
from rlstreams.workers.loop.log import Log

E = TypeVar("E")


class ForeignRecords:
    """Passes events on, and logs records that are none.

    Args:
        reader: name of the reader, for the log.
        schemas: of the bus that it reads from.
    """

    def __init__(self, reader: str, schemas: SchemaTexts) -> None:
        self.log = Log({"reader": reader})
        self._schemas = schemas

    def readable(self, raws: Iterable[RawRecord]) -> Iterator[Record[Event]]:
        """The records that decode, in order."""
        for raw in raws:
            try:
                record = decoded(raw, self._schemas)
            except DecodeError as err:
                self.note(raw, str(err))
            else:
                yield record

    def note(self, raw: RawRecord, detail: str) -> None:
        """Log a record that is not ours."""
        self.log.warning("foreign_record", position=str(raw.position), detail=detail)


class EventReader(Closing):
    """Reads partitions without a group, and yields their events; see `ForeignRecords`.

    Args:
        start: offset by partition.
        name: of the reader, for the log.
    """

    def __init__(self, bus: Bus, start: Mapping[Partition, int], name: str) -> None:
        self._foreign = ForeignRecords(name, bus.schemas())
        self._reader = bus.reader(start)
        self.log = self._foreign.log

    def poll(self, max_records: int, timeout_s: float = 0.0) -> Iterator[Record[Event]]:
        """Yield the events of one poll, which by default does not wait."""
        yield from self._foreign.readable(self._reader.poll(max_records, timeout_s))

    def up_to(
        self, ends: Mapping[Partition, int], deadline_s: float = DELIVERY_S
    ) -> Iterator[Record[Event]]:
        """Yield events until the reader is at `ends`; some may lie behind them.

        Raises:
            DeadlineError: nothing was delivered for `deadline_s`; names partitions and positions.
        """
        for raws in read_to(self._reader, ends, deadline_s):
            yield from self._foreign.readable(raws)

    def positions(self) -> Mapping[Partition, int]:
        """Return the next offset to deliver by partition."""
        return self._reader.positions()

    def close(self) -> None:
        """Release the reader; idempotent."""
        self._reader.close()


def near_end(bus: Bus, topic: str, num: int) -> dict[Partition, int]:
    """Return the offset `num` before the end of each partition, or where the partition begins."""
    beginnings = bus.beginnings(topic)
    return {at: max(beginnings[at], end - num) for at, end in bus.ends(topic).items()}


def events_now(
    bus: Bus,
    start: Mapping[Partition, int],
    kind: type[E],
    name: str,
    deadline_s: float = DELIVERY_S,
) -> Iterator[E]:
    """Yield the committed events of a kind in one topic, from `start` on; see `EventReader`.

    Raises:
        DeadlineError: as `EventReader.up_to`.
    """
    ends = {p: end for p, end in bus.ends(next(iter(start)).topic).items() if end > start[p]}
    with EventReader(bus, start, name) as reader:
        for record in reader.up_to(ends, deadline_s):
            if isinstance(record.event, kind):
                yield record.event
