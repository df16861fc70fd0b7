"""Read-only access to a run's records, on a live broker or in a recording: one interface for both.

Nothing here commits an offset or joins a group. A log is read up to the end that it had when
reading began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol, TypeVar

from rlstreams.schemas import DecodeError, SchemaTexts
from rlstreams.schemas.events import EVENTS, Event
from rlstreams.streams.log.bus import Bus, Closing, Reader
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.partitioner import partition_of
from rlstreams.streams.log.record import Partition, RawRecord, Record
from rlstreams.streams.log.topic import Topic
from rlstreams.streams.log.topics import PROMPTS, TOPICS

E = TypeVar("E", bound=Event)

READ_DEADLINE_S = 30.0
_BATCH = 1000
_POLL_S = 0.2


class RunLog(Closing, Protocol):
    """The records of one run. Belongs to one thread; read one topic at a time."""

    name: str
    """What people call it: the run's id, or the recording's folder."""
    num_unreadable: int
    """Records that `read` passed by since the log was opened."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What of it is known to be missing, a sentence each."""
        return ()

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """Whole records, each partition in its order; with `groups` only theirs, found faster.

        How partitions follow each other is the log's own, and the same each time.

        Raises:
            DeadlineError: a partition did not deliver up to its end; names it.
        """

    def schemas(self) -> SchemaTexts:
        """Schema texts that came with the run: for events of other releases."""

    def read(
        self,
        kind: type[E],
        groups: Collection[str] | None = None,
        *,
        skip_unreadable: bool = False,
    ) -> Iterator[Record[E]]:
        """Every event of one kind, `Trajectory` for example, with its envelope.

        Args:
            kind: says the topic; the order is that of `records`.
            groups: only events of these groups; for topics whose key is the group.
            skip_unreadable: count what cannot be decoded in `num_unreadable`, and go on.

        Raises:
            schemas.DecodeError: a record that is no event of ours; names its position.
            ValueError: `groups` for a topic that has another key.
        """
        topic = topic_of(kind)
        if groups is not None and topic.key != "group_id":
            raise ValueError(f"{topic.name} is keyed by {topic.key}: it cannot be read by group")
        for record in self.read_topic(topic, groups, skip_unreadable=skip_unreadable):
            if isinstance(record.event, kind):
                yield Record(event=record.event, raw=record.raw)

    def read_topic(
        self,
        topic: Topic,
        groups: Collection[str] | None = None,
        *,
        skip_unreadable: bool = False,
        only: Callable[[RawRecord], bool] = lambda _: True,
    ) -> Iterator[Record[Event]]:
        """The same for all kinds of one topic, in its order; `only` sorts out before decoding."""
        schemas = self.schemas()
        for raw in filter(only, self.records(topic, groups)):
            try:
                yield decoded(raw, schemas)
            except DecodeError as err:
                if not skip_unreadable:
                    raise DecodeError(f"{raw.position}: {err}") from err
                self.num_unreadable += 1


def topic_of(kind: type[object]) -> Topic:
    """The topic that carries this kind of event.

    Raises:
        ValueError: not one of our events.
    """
    for topic in TOPICS:
        if kind in topic.events:
            return topic
    known = ", ".join(event.__name__ for event in EVENTS)
    raise ValueError(f"{kind.__name__} is no event of ours; known: {known}")


class BusLog(RunLog):
    """A log that lies on a broker: partition after partition, one reader for all.

    Args:
        name: what people call it.
        deadline_s: longest wait for the next record below a known end.
    """

    def __init__(self, bus: Bus, name: str, deadline_s: float = READ_DEADLINE_S) -> None:
        self.name = name
        self.num_unreadable = 0
        self._bus = bus
        self._deadline_s = deadline_s

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`; a group's records lie in one partition, the others are not read."""
        keys = None if groups is None else {group.encode() for group in groups}
        ends = self._bus.ends(topic.name)
        with self._bus.reader() as reader:
            for partition, begin in sorted(self._bus.beginnings(topic.name).items()):
                if keys is not None and not _may_hold(partition, keys, len(ends)):
                    continue
                for raw in self._partition(reader, partition, begin, ends.get(partition, 0)):
                    if keys is None or raw.key in keys:
                        yield raw

    def schemas(self) -> SchemaTexts:
        """See `RunLog`: what the topic `schemas` holds."""
        return self._bus.schemas()

    def _partition(
        self, reader: Reader, partition: Partition, begin: int, end: int
    ) -> Iterator[RawRecord]:
        reader.seek({partition: begin})
        until_s = time.monotonic() + self._deadline_s
        at = begin
        while at < end:
            records = reader.poll(_BATCH, _POLL_S)
            yield from (raw for raw in records if raw.position.offset < end)
            before, at = at, reader.positions().get(partition, at)
            if records or at != before:
                until_s = time.monotonic() + self._deadline_s
            elif time.monotonic() > until_s:
                raise DeadlineError(
                    f"reading {partition}: at offset {at} of {end}, "
                    f"nothing delivered for {self._deadline_s:g} s"
                )

    def close(self) -> None:
        """The bus belongs to who gave it."""


def _may_hold(partition: Partition, keys: Collection[bytes], num_partitions: int) -> bool:
    """Whether records with one of these keys can lie in this partition.

    `prompts` chooses partitions itself (training groups by number), so all of its may.
    """
    if partition.topic == PROMPTS.name:
        return True
    return any(partition.number == partition_of(key, num_partitions) for key in keys)
