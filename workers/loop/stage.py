"""The loop of every role that transforms records of one topic into records of another.

Samples finish out of order. One transaction per commit interval carries the outputs of what
finished and the positions {low watermark, done set} of their inputs, so a crash repeats only
unfinished work, and nothing twice (decisions 0002, 0009). Work in progress (delivered but not
committed) is bounded in records by the stage and in bytes here. `workers.loop.probation` decides
which records to start after a predecessor's crash, `workers.loop.outbox` how to retry sending them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Protocol

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Event, Prompt
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import AbortedError, StreamsError
from rlstreams.streams.log.probing import Probing
from rlstreams.streams.log.record import Committed, Outgoing, Partition, RawRecord, Record
from rlstreams.streams.log.topics import DEAD_LETTERS
from rlstreams.streams.log.tracker import Tracker
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, dead_letter, refusal, sample_of
from rlstreams.workers.loop.log import get as get_log
from rlstreams.workers.loop.outbox import Finished, Outbox
from rlstreams.workers.loop.probation import MAX_TRIES, Probation
from rlstreams.workers.loop.runtime import IDLE_S

MAX_POLL = 256  # records of one poll
IN_HAND_BYTES = 256_000_000  # of inputs and outputs; one poll's fetch may come on top

__all__ = ["Finished", "Stage", "StageLoop"]


class Stage(Protocol):
    """What a role does with its records; called from the loop's thread, never waits."""

    def room(self) -> int:
        """How many more records it would take now."""

    def begin(self, record: Record[Event]) -> None:
        """Start work on a record.

        Raises:
            ValueError: not a record for this role, or a field that cannot be; it is dead-lettered.
        """

    def finished(self) -> Sequence[Finished]:
        """What was finished since the last call."""

    def give_up(self, partitions: Set[Partition]) -> None:
        """Stop work on records of partitions that went to another member.

        What still finishes of them is dropped: their new owner does it.
        """

    def probing(self, raw: RawRecord, tries: int) -> None:
        """Called before a record is begun at which the last `tries` workers died."""

    def announcements(self) -> Sequence[Outgoing]:
        """Records that are not about an input; they go out at once, before any finished one."""

    def farewell(self) -> Sequence[Outgoing]:
        """The last records of a clean end."""

    @property
    def num_open(self) -> int:
        """Records begun and not yet returned as finished."""

    def close(self) -> None:
        """Give up what is open; release everything."""


class StageLoop:
    """A `Role` around a `Stage`: the group membership, the tracker and the transactions.

    Args:
        topic: what it reads.
        interval_s: finished records wait at most this long for their transaction.
        in_hand_bytes: nothing more is polled while inputs and outputs hold as much.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        stage: Stage,
        topic: str,
        *,
        interval_s: float,
        in_hand_bytes: int = IN_HAND_BYTES,
    ) -> None:
        self.is_paused = False
        self._context = context
        self._bus = bus
        self._stage = stage
        self._topic = topic
        self._interval_s = interval_s
        self._in_hand_bytes = in_hand_bytes
        self._drain_s = context.config.deadlines.drain_s
        self._producer = bus.producer(context.transactional_id)
        self._consumer = bus.consumer(context.role, [topic])
        self._consumer.before_revoked(self._let_go)
        self._tracker = Tracker()
        self._outbox = Outbox(self._producer, self._consumer, self._tracker, self._unwritable)
        self._probation = Probation(min(stage.room(), MAX_POLL))
        self._ends: Mapping[Partition, int] = {}  # of the topic when a suspect was taken over
        self._waiting: list[RawRecord] = []  # delivered, not begun
        self._owed: dict[Partition, Probing | None] = {}  # notes to be committed before that
        self._next_commit = 0.0
        self._drain_until: float | None = None

    def turn(self) -> None:
        """Poll, begin, collect, commit. While a transaction is under way, collect and wait."""
        if self._outbox.is_in_flight:
            self._outbox.add(self._stage.finished())
            if not self._outbox.settle(IDLE_S):
                return
        self._announce()
        self._take()
        self._begin_waiting()
        self._outbox.add(self._stage.finished())
        now = time.monotonic()
        is_due = now >= self._next_commit or self._drain_until is not None
        if self._outbox.has_ready and is_due and self._announce():
            self._tracker.on_probation = self._probation.is_active
            self._outbox.commit()
            self._next_commit = now + self._interval_s

    def drain(self) -> None:
        """Take nothing new; what is unfinished after `drain_s` stays in flight."""
        self._drain_until = time.monotonic() + self._drain_s
        self._waiting = []

    @property
    def done(self) -> bool:
        """Drained."""
        if self._drain_until is None:
            return False
        nothing_left = self._stage.num_open == 0 and self._outbox.is_empty
        return nothing_left or time.monotonic() > self._drain_until

    @property
    def is_idle(self) -> bool:
        """Nothing is begun, nothing waits to be begun or told."""
        return not self._waiting and self._stage.num_open == 0 and self._outbox.is_empty

    def close(self) -> None:
        """Leave the group; a worker that is done also reports its end and takes its tries back."""
        with ExitStack() as stack:  # whatever fails, the rest is released
            for each in (self._producer, self._consumer, self._stage):
                stack.callback(each.close)
            if self.done:
                self._part()

    def _part(self) -> None:
        with suppress(AbortedError):
            while not self._outbox.settle(IDLE_S):
                pass  # until its deadline
            notes = self._without_our_tries(self._tracker.noted)
            self._producer.commit(self._stage.farewell(), notes, self._consumer)

    def _let_go(self, partitions: Set[Partition]) -> None:
        """Put back the notes that this worker found: it leaves these partitions alive.

        Called where no transaction is under way. If this one is aborted, the notes stay.
        """
        with suppress(AbortedError):
            notes = self._without_our_tries(self._tracker.noted & partitions)
            self._producer.commit([], notes, self._consumer)

    def _without_our_tries(self, partitions: Set[Partition]) -> Mapping[Partition, Committed]:
        """Notes with the tries of predecessors alone: those died, and a record may kill slowly."""
        found = {partition: self._tracker.inherited(partition) for partition in partitions}
        return self._tracker.with_notes(found)

    def _announce(self) -> bool:
        return self._outbox.announce(self._stage.announcements())

    def _take(self) -> None:
        in_hand = self._tracker.num_bytes + self._outbox.num_bytes
        max_bytes = self._in_hand_bytes - in_hand
        room = self._room() if max_bytes > 0 else 0
        reach(CrashPoint.POLL_BEFORE)
        polled = self._consumer.poll(room, self._idle_s(), max_bytes=max(1, max_bytes))
        reach(CrashPoint.POLL_AFTER)
        new = self._tracker.take(polled, self._consumer.positions())
        for partition in polled.revoked:
            self._probation.give_up(partition)
            self._owed.pop(partition, None)
        if polled.revoked:
            self._stage.give_up(polled.revoked)
        if polled.assigned:
            self._take_over(polled.assigned)
        if self._drain_until is None:
            self._waiting = [raw for raw in (*self._waiting, *new) if self._tracker.holds(raw)]
        suspects = self._probation.suspects
        others = self._tracker.partitions - suspects if suspects else frozenset()
        self._consumer.pause(self._tracker.too_wide() | others)

    def _idle_s(self) -> float:
        """How long to wait for records: not beyond the time at which a commit is due."""
        if not self._outbox.has_ready:
            return IDLE_S
        return min(IDLE_S, max(0.0, self._next_commit - time.monotonic()))

    def _room(self) -> int:
        if self._drain_until is not None or self.is_paused:
            return 0
        room = min(self._stage.room(), MAX_POLL) - len(self._waiting)
        if self._probation.is_active:
            wanted = self._probation.allowed(self._tracker.holds, time.monotonic())
            room = min(room, wanted - len(self._probation.eligible(self._waiting)))
            room = max(room, 1 if self._probation.suspects and wanted else 0)
        return max(0, room)

    def _take_over(self, assigned: Mapping[Partition, Committed]) -> None:
        """Note the takeover, unless there is a note: then its first record is suspect."""
        for partition, committed in assigned.items():
            if problem := self._tracker.problem(partition):
                get_log(self._context.role, self._context.worker, self._context.instance).warning(
                    "no_done_set",
                    group=self._context.role,
                    partition=f"{partition.topic}[{partition.number}]",
                    position=committed.offset,
                    why=f"{problem}; what was finished above the position is done again",
                )
            note = self._tracker.inherited(partition)
            if note is None:
                self._owed[partition] = Probing(self._tracker.low(partition), 1)
            else:
                self._probation.suspect(partition, note.tries)
        if self._probation.suspects:
            self._ends = self._bus.ends(self._topic)

    def _begin_waiting(self) -> None:
        if not self._commit_notes(self._owed):
            return
        self._owed = {}
        if not self._probation.is_active:
            begun, self._waiting = self._waiting, []
            for raw in begun:
                self._begin(raw)
            return
        self._clear_exhausted()
        allowed = self._probation.allowed(self._tracker.holds, time.monotonic())
        turn = self._probation.eligible(self._waiting)[:allowed]
        if turn and self._try(turn):
            taken = {raw.position for raw in turn}
            self._waiting = [raw for raw in self._waiting if raw.position not in taken]

    def _clear_exhausted(self) -> None:
        """Give up a suspect partition that has no records left: it must not hold others up."""
        waiting = {raw.partition for raw in self._waiting}
        for partition in self._probation.suspects - waiting:
            if self._tracker.position(partition) >= self._ends[partition]:
                self._probation.give_up(partition)

    def _try(self, round_: Sequence[RawRecord]) -> bool:
        """Begin a round of the probation; False: its note was aborted, so nothing is begun."""
        tries = self._probation.tries(round_[0].partition)
        if tries:
            raw = round_[0]
            if tries >= MAX_TRIES:
                self._probation.clear(raw.partition)
                self._outbox.add([self._killer(raw, tries)])
                return True
            self._stage.probing(raw, tries)
            note = Probing(raw.offsets[0], tries + 1)
            if not (self._announce() and self._commit_notes({raw.partition: note})):
                return False
            self._probation.clear(raw.partition)
        self._probation.begun(round_, time.monotonic())
        for raw in round_:
            self._begin(raw)
        return True

    def _commit_notes(self, notes: Mapping[Partition, Probing | None]) -> bool:
        if not notes:
            return True
        if not self._outbox.position(self._tracker.with_notes(notes)):
            return False
        self._tracker.note(notes)
        return True

    def _begin(self, raw: RawRecord) -> None:
        event: Event | None = None
        try:
            record = self._decoded(raw)
            event = record.event
            self._stage.begin(record)
        except (ValueError, RecursionError) as err:  # the latter of JSON that is nested too deep
            letter = refusal(self._context, raw, event, err)
            self._outbox.add([Finished(raw=raw, outputs=(outgoing(DEAD_LETTERS, letter),))])

    def _decoded(self, raw: RawRecord) -> Record[Event]:
        """That nobody can be asked for its schema is not its doing: it is not noted as begun."""
        try:
            return decoded(raw, self._bus.schemas())
        except StreamsError:
            with suppress(StreamsError):  # the first error says what happened
                self._let_go(self._tracker.noted)
            raise

    def _killer(self, raw: RawRecord, tries: int) -> Finished:
        detail = (
            f"the last {tries} workers that began it died, the last {tries - 1} of them with "
            f"nothing else begun after it; {self._context.worker} did not try again"
        )
        return self._buried(raw, Reason.KILLS_WORKER, detail)

    def _unwritable(self, done: Finished, why: str, with_bytes: bool) -> Finished:
        return self._buried(done.raw, Reason.TRANSACTION, why, with_bytes=with_bytes)

    def _buried(
        self, raw: RawRecord, reason: Reason, detail: str, *, with_bytes: bool = True
    ) -> Finished:
        try:
            sample = sample_of(decoded(raw, self._bus.schemas()).event)
        except DecodeError:
            sample = None
        letter = dead_letter(
            self._context,
            raw,
            sample,
            reason=reason,
            detail=detail,
            permanent=isinstance(sample, Prompt),
        )
        if not with_bytes:
            letter = replace(letter, value=b"")
        return Finished(raw=raw, outputs=(outgoing(DEAD_LETTERS, letter),))
