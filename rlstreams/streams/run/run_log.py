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
from rlstreams.streams.lineage.fold import Lineage, LineageFold, SampleId, is_group
from rlstreams.streams.log.bus import Bus, Closing, existing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.partitioner import partition_of
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
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session

E = TypeVar("E", bound=Event)

READ_DEADLINE_S = 30.0  # longest wait for the next record below a known end
DONE = "done"  # the trainer's last heartbeat says so
_BATCH = 1000
_POLL_S = 0.2


class RunLog(Closing):
    """The records of one run, read when they are asked for.

    Belongs to one thread; read one topic at a time. Reading goes up to the end that the log had
    when it began; `follow` goes on.
    """

    name: str
    """What people call it: the run's id, or the recording's folder."""
    bus: Bus
    """The port that it is read through; a recording's refuses to write."""
    num_unreadable: int = 0
    """Records that were passed by since the log was opened, for they are no events of ours."""
    is_growing: bool = False
    """Whether records may still come."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What of it is known to be missing, a sentence each."""
        return ()

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The resolved configuration at the run's newest claim, by section; empty before it."""
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
        """Every event of one kind that counts, `Trajectory` for example, with its envelope.

        Of a sample that is the first record, of `steps` what the trainer of the newest epoch wrote,
        each step once (`log.fencing`).

        Args:
            kind: says the topic; each partition comes in its order, and how they follow each other
                is the log's own, and the same each time.
            groups: only events of these groups, of `calls` and `outcomes` of these sessions; for
                topics with such a key.
            with_copies: also what does not count.
            skip_unreadable: count what cannot be decoded in `num_unreadable`, and go on.

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
        """The optimizer steps in their order. As `read`, and passes by what cannot be decoded."""
        return self._events(StepCompleted)

    def versions(self) -> Iterator[PolicyPublished]:
        """The weight versions that workers could pull, as they were published; so too."""
        return self._events(PolicyPublished)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """What was set aside, and why; so too."""
        return self._events(DeadLetter)

    def _events(self, kind: type[E]) -> Iterator[E]:
        return (record.event for record in self.read(kind, skip_unreadable=True))

    def samples(self, *names: str) -> list[Lineage]:
        """The history of samples, each from its prompt to the version that it helped to make.

        Args:
            names: `12/3` is sample 3 of group 12, `12` its whole group; `e40-7/0` and `e40-7` are
                of the evaluation of version 40.

        Returns:
            Those named one by one in their order, then the others of whole groups. Of a sample
            that the log does not know the outcome is `unknown`.

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
        if fold.dropped_groups:  # prompts of other groups say what replaced them
            for prompt in self.read(Prompt, skip_unreadable=True):
                is_new = prompt.event.group_id not in fold.groups
                if is_new and prompt.event.replaces in fold.dropped_groups:
                    fold.apply(prompt)
        return fold.lineages()

    def sessions(self, *names: str) -> list[Session]:
        """Agents' sessions, with their trees of calls and their outcomes; those that are there.

        Args:
            names: ids, of a sample's session its name, as 12/3; none: all sessions of the run.

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
        """Events that count, as they come; of several kinds in the order in which they are read.

        Ends when the run is done and all was read, after `deadline_s` from the first `next`, or
        when `stopped()` is true. What cannot be decoded is counted in `num_unreadable`. With
        `from_start` those come first that are there already; otherwise only new ones come, and a
        copy is told from a first record only among them.

        Raises:
            ValueError: no event of ours.
            BrokerError: the broker is gone.
        """
        until_s = time.monotonic() + deadline_s
        topics = {topic_of(kind) for kind in kinds}
        ledger = Ledger(begins_anywhere=True)  # says when the run is done
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
        """Events of all kinds of one topic, copies included: for folds. Raises as `read`."""
        return self._decoded(self.records(topic, groups), skip_unreadable=skip_unreadable)

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """Whole records as they lie there; with `groups` only theirs, found faster.

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
    """What tells the events of a topic that count."""
    return Ledger(begins_anywhere=True).apply if topic is STEPS else FirstRecords().admits


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
        close: called by `close`, once.
    """

    is_growing = True

    def __init__(self, bus: Bus, name: str, *, close: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.bus = bus
        self._close = close

    def records(self, topic: Topic, groups: Collection[str] | None = None) -> Iterator[RawRecord]:
        """See `RunLog`; a group's records lie in one partition, the others are not read."""
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
        """Release what was opened for it; idempotent."""
        close, self._close = self._close, lambda: None
        close()


def _may_hold(partition: Partition, keys: Collection[bytes], num_partitions: int) -> bool:
    """Whether records with one of these keys can lie in this partition.

    `prompts` chooses partitions itself (training groups by number), and sessions lie where
    their prompts do, so all of theirs may.
    """
    if partition.topic in (PROMPTS.name, CALLS.name, OUTCOMES.name):
        return True
    return any(partition.number == partition_of(key, num_partitions) for key in keys)
