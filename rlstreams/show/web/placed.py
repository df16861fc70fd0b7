"""A log whose reader has noted where the records of each group lie: one sample is found at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from rlstreams.schemas.events import Event, GroupsDropped, StepCompleted
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.bus import existing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.group_ids import group_of
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Partition, RawRecord, Record
from rlstreams.streams.log.topics import STEPS, Topic
from rlstreams.streams.run.run_log import BusLog, RunLog

BEHIND = 1000  # offsets in which the last part of a large record comes
GONE_S = 5.0  # longest wait for a record that was there


class Places:
    """Places of a log's records, noted by their reader; another thread may ask meanwhile.

    Of `steps`, whose records name hundreds of samples, it also keeps each without its samples and
    figures. A sample's history needs the versions that all steps made, and the whole of its own.
    """

    def __init__(self) -> None:
        # By key: the first and the last offset in each partition.
        self._spans = defaultdict[bytes, dict[Partition, tuple[int, int]]](dict)
        self._steps: list[Record[Event]] = []
        self._naming = defaultdict[str, set[int]](set)  # by group: offsets of `steps`

    def note(self, record: Record[Event]) -> None:
        """Note a record's place."""
        topic, number, offset = record.position
        spans, at = self._spans[record.raw.key], Partition(topic, number)
        first, last = spans.get(at, (offset, offset))
        spans[at] = min(first, offset), max(last, offset)
        if topic == STEPS.name:
            for group in _groups(record.event):
                self._naming[group].add(offset)
            raw = record.raw._replace(value=b"")
            self._steps.append(Record(event=_without_samples(record.event), raw=raw))

    def of(self, key: bytes) -> list[tuple[Partition, tuple[int, int]]]:
        """First and last offset of a key's records, by partition."""
        return list(self._spans.get(key, {}).items())

    def steps(self, groups: Collection[str]) -> tuple[list[Record[Event]], set[int]]:
        """Records of `steps` without samples, and the offsets of those that name these groups."""
        named = set().union(*(self._naming.get(group, ()) for group in groups))
        return self._steps[:], named


def _groups(event: Event) -> set[str]:
    if isinstance(event, StepCompleted):
        found = {ref.group_id for ref in event.samples}
        return found | {one.group_id for one in event.absent}
    return {one.group_id for one in event.groups} if isinstance(event, GroupsDropped) else set()


def _without_samples(event: Event) -> Event:
    if isinstance(event, StepCompleted):
        return replace(
            event, samples=(), absent=(), masked=(), micro_batches=(), order=(), rows=(), bins=(),
            rng=b"", metrics={},
        )  # fmt: skip
    return replace(event, groups=()) if isinstance(event, GroupsDropped) else event


class PlacedLog(RunLog):
    """A log that is read at the places that its reader noted.

    Args:
        places: of the records of `log`.
    """

    def __init__(self, log: BusLog, places: Places) -> None:
        self.name, self.bus, self._log, self._places = log.name, log.bus, log, places
        self._groups: frozenset[str] = frozenset()  # whose steps are read whole

    def samples(self, *names: str) -> list[Lineage]:
        """See `RunLog`."""
        self._groups = frozenset(group_of(name) or name for name in names)
        return super().samples(*names)

    def read_topic(
        self,
        topic: Topic,
        groups: Collection[str] | None = None,
        *,
        skip_unreadable: bool = False,
    ) -> Iterator[Record[Event]]:
        """See `RunLog`; a record of `steps` without a wanted group comes without its samples."""
        if topic != STEPS or groups is not None:
            yield from super().read_topic(topic, groups, skip_unreadable=skip_unreadable)
            return
        records, named = self._places.steps(self._groups)
        schemas = self.bus.schemas()
        for record in records:
            if record.position.offset in named:
                yield from (decoded(raw, schemas) for raw in self._at(record))
            else:
                yield record

    def _at(self, record: Record[Event]) -> Iterator[RawRecord]:
        topic, number, offset = record.position
        at = Partition(topic, number)
        begins, ends = self.bus.beginnings(topic), self.bus.ends(topic)
        if offset < begins[at]:
            return
        with self.bus.reader({at: offset}) as reader:
            for raws in read_to(reader, {at: min(ends[at], offset + BEHIND)}, GONE_S):
                for raw in raws:
                    if raw.position == record.position:
                        yield raw
                        return

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`."""
        if groups is None:
            yield from self._log.records(topic)
            return
        if not existing(self.bus, (topic,)):
            return
        begins, ends = self.bus.beginnings(topic.name), self.bus.ends(topic.name)
        with self.bus.reader() as reader:
            for key in (group.encode() for group in groups):
                for at, (first, last) in self._places.of(key):
                    end = min(ends.get(at, 0), last + BEHIND)
                    if at.topic != topic.name or end <= (begin := max(first, begins[at])):
                        continue
                    reader.seek({at: begin})
                    for raws in read_to(reader, {at: end}, GONE_S):
                        yield from (raw for raw in raws if raw.key == key)

    def close(self) -> None:
        """Do nothing: the block that opened the log closes it."""
