"""The log of one run, read with types: the same object for a live, a finished, a remote or a
recorded run.

Nothing here commits an offset or joins a group. `open_run` opens one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import (
    EVENTS,
    DeadLetter,
    Event,
    PolicyPublished,
    Prompt,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.lineage.fold import Lineage, LineageFold
from rlstreams.streams.log.bus import Bus, Closing, existing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.group_ids import SampleId, is_group
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Partition, RawRecord, Record
from rlstreams.streams.log.topics import (
    CALLS,
    DEAD_LETTERS,
    OUTCOMES,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TOPICS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.streams.run.partitioner import partition_of
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session

E = TypeVar("E", bound=Event)

READ_DEADLINE_S = 30.0  # longest wait for the next record below a known end
DONE = "done"  # state in the trainer's last heartbeat
_BATCH = 1000
_POLL_S = 0.2


class RunLog(Closing):
    """The records of one run, read when they are asked for.

    Belongs to one thread; read one topic at a time. Reading goes up to the end that the log had
    when it began; `follow` goes on.
    """

    name: str
    """Name for people: the run's id, or the recording's folder."""
    bus: Bus
    """The port that it is read through; a recording's refuses to write."""
    num_unreadable: int = 0
    """Number of records passed by since the log was opened, for they are no events of ours."""
    is_growing: bool = False
    """Whether records may still come."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Parts of the log that are known to be missing, a sentence each."""
        return ()

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The resolved configuration of the newest claim, by section; empty without a claim."""
        newest = ""
        for claim in self.read(TrainerStarted, skip_unreadable=True):
            newest = claim.event.config
        return json.loads(newest) if newest else {}

    def read(
        self,
        kind: type[E],
        groups: Collection[str] | None = None,
        *,
        with_copies: bool = False,
        skip_unreadable: bool = False,
    ) -> Iterator[Record[E]]:
        """Yield every event of one kind that counts, `Trajectory` for example, with its envelope.

        A sample's first record counts; in `steps`, events of the epoch in force, each step once
        (`log.fencing`).

        Args:
            kind: decides the topic; each partition comes in its order, and the order between
                partitions is the same each time.
            groups: only events of these groups, of `calls` and `outcomes` of these sessions; for
                topics with such a key.
            with_copies: also events that do not count.
            skip_unreadable: count records that cannot be decoded in `num_unreadable`, and go on.

        Raises:
            schemas.DecodeError: a record that is no event of ours; names its position.
            DeadlineError: a partition did not deliver up to its end; names it.
            ValueError: no event of ours; `groups` for a topic that has another key.
        """
        topic = topic_of(kind)
        if groups is not None and topic.key not in ("group_id", "session_id"):
            raise ValueError(f"{topic.name} is keyed by {topic.key}: it cannot be read by group")
        gate = _gate(topic)
        for record in self.read_topic(topic, groups, skip_unreadable=skip_unreadable):
            if (with_copies or gate(record.event)) and isinstance(record.event, kind):
                yield Record(event=record.event, raw=record.raw)

    def steps(self) -> Iterator[StepCompleted]:
        """Yield the optimizer steps in order, as `read`; skip records that cannot be decoded."""
        return self._events(StepCompleted)

    def versions(self) -> Iterator[PolicyPublished]:
        """Yield the published weight versions; likewise."""
        return self._events(PolicyPublished)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters; likewise."""
        return self._events(DeadLetter)

    def _events(self, kind: type[E]) -> Iterator[E]:
        return (record.event for record in self.read(kind, skip_unreadable=True))

    def samples(self, *names: str) -> list[Lineage]:
        """Return samples' histories, each from its prompt to the version that it helped to make.

        Args:
            names: `12/3` is sample 3 of group 12, `12` its whole group; `e40-7/0` and `e40-7` are
                of the evaluation of version 40.

        Returns:
            Samples named one by one in their order, then the others of whole groups. A sample
            that the log does not know has the outcome `unknown`.

        Raises:
            ValueError: a name of another form, or none.
            DeadlineError: a partition did not deliver up to its end.
        """
        if not names:
            raise ValueError("name samples, as 12/3, or groups, as 12")
        groups = [name for name in names if is_group(name)]
        wanted = [SampleId.parse(name) for name in names if not is_group(name)]
        fold = LineageFold(wanted, groups)
        for topic in (PROMPTS, TRAJECTORIES, SCORED, DEAD_LETTERS):
            for record in self.read_topic(topic, fold.groups, skip_unreadable=True):
                fold.apply(record)
        for topic in (STEPS, POLICY_VERSIONS, POLICY_PULLS):
            for record in self.read_topic(topic, skip_unreadable=True):
                fold.apply(record)
        if fold.dropped_groups:  # prompts of other groups name the groups that they replace
            for prompt in self.read(Prompt, skip_unreadable=True):
                is_new = prompt.event.group_id not in fold.groups
                if is_new and prompt.event.replaces in fold.dropped_groups:
                    fold.apply(prompt)
        return fold.lineages()

    def sessions(self, *names: str) -> list[Session]:
        """Return agents' sessions that the log holds, with their trees of calls and their outcomes.

        Args:
            names: session ids, which are samples' names, as 12/3; none: all sessions of the run.

        Raises:
            DeadlineError: a partition did not deliver up to its end.
        """
        sessions = SessionLog()
        for topic in (CALLS, OUTCOMES):
            for record in self.read_topic(topic, names or None, skip_unreadable=True):
                sessions.apply(record.event, record.position.offset)
        return list(sessions)

    def follow(
        self,
        *kinds: type[E],
        deadline_s: float,
        from_start: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Record[E]]:
        """Yield events that count, as they come; several kinds in the order in which they are read.

        Ends when the run is done and all was read, after `deadline_s` from the first `next`, or
        when `stopped()` is true. Records that cannot be decoded are counted in `num_unreadable`.
        With `from_start`, the log's present events come first; otherwise only new ones come, and a
        copy of an older record counts as a first one.

        Raises:
            ValueError: no event of ours.
            BrokerError: the broker is gone.
        """
        until_s = time.monotonic() + deadline_s
        topics = {topic_of(kind) for kind in kinds}
        ledger = Ledger(begins_anywhere=True)  # knows when the run is done
        gates = {topic.name: _gate(topic) for topic in topics} | {STEPS.name: ledger.apply}
        since = self._offsets(topics) if from_start else self._ends(topics)
        with self.bus.reader({**since, **self._offsets({STEPS})}) as reader:
            while not stopped() and time.monotonic() < until_s:
                raws = reader.poll(_BATCH, _POLL_S)
                for record in self._decoded(raws, skip_unreadable=True):
                    event, (topic, number, offset) = record.event, record.position
                    if not gates[topic](event):
                        continue
                    if isinstance(event, kinds) and offset >= since[Partition(topic, number)]:
                        yield Record(event=event, raw=record.raw)
                is_done = ledger.heartbeat is not None and ledger.heartbeat.state == DONE
                if not raws and (is_done or not self.is_growing):
                    at = reader.positions()
                    if all(at.get(p, 0) >= end for p, end in self._ends(topics).items()):
                        return

    def read_topic(
        self,
        topic: Topic,
        groups: Collection[str] | None = None,
        *,
        skip_unreadable: bool = False,
    ) -> Iterator[Record[Event]]:
        """Yield events of all kinds of one topic, copies included: for folds. Raises as `read`."""
        return self._decoded(self.records(topic, groups), skip_unreadable=skip_unreadable)

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """Yield whole records of a topic; with `groups` only theirs, found faster.

        Raises:
            DeadlineError: a partition did not deliver up to its end; names it.
        """
        raise NotImplementedError

    def _decoded(
        self, raws: Iterable[RawRecord], *, skip_unreadable: bool
    ) -> Iterator[Record[Event]]:
        schemas = self.bus.schemas()
        for raw in raws:
            try:
                yield decoded(raw, schemas)
            except DecodeError as err:
                if not skip_unreadable:
                    raise DecodeError(f"{raw.position}: {err}") from err
                self.num_unreadable += 1

    def _offsets(self, topics: Collection[Topic]) -> dict[Partition, int]:
        there = existing(self.bus, topics)
        return {p: at for topic in there for p, at in self.bus.beginnings(topic.name).items()}

    def _ends(self, topics: Collection[Topic]) -> dict[Partition, int]:
        there = existing(self.bus, topics)
        return {p: at for topic in there for p, at in self.bus.ends(topic.name).items()}


def _gate(topic: Topic) -> Callable[[Event], bool]:
    """Return a function that decides whether an event of the topic counts."""
    return Ledger(begins_anywhere=True).apply if topic is STEPS else FirstRecords().admits


def topic_of(kind: type[object]) -> Topic:
    """Return the topic that carries this kind of event.

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
        name: its name for people.
        close: called by `close`, once.
    """

    is_growing = True

    def __init__(self, bus: Bus, name: str, *, close: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.bus = bus
        self._close = close

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`; a group's records lie in one partition, and others are not read."""
        keys = None if groups is None else {group.encode() for group in groups}
        if not existing(self.bus, (topic,)):
            return
        ends = self.bus.ends(topic.name)
        with self.bus.reader() as reader:
            for partition, begin in sorted(self.bus.beginnings(topic.name).items()):
                if keys is not None and not _may_hold(partition, keys, len(ends)):
                    continue
                reader.seek({partition: begin})
                end = ends.get(partition, 0)
                for records in read_to(reader, {partition: end}, READ_DEADLINE_S, batch=_BATCH):
                    for raw in records:
                        if raw.position.offset < end and (keys is None or raw.key in keys):
                            yield raw

    def close(self) -> None:
        """Release the connections that were opened for it; idempotent."""
        close, self._close = self._close, lambda: None
        close()


def _may_hold(partition: Partition, keys: Collection[bytes], num_partitions: int) -> bool:
    """Whether records with one of these keys can lie in this partition.

    `prompts` chooses partitions itself (training groups by number), and sessions lie in their
    prompts' partition numbers, so any partition of these topics can.
    """
    if partition.topic in (PROMPTS.name, CALLS.name, OUTCOMES.name):
        return True
    return any(partition.number == partition_of(key, num_partitions) for key in keys)
