"""Commit protocol of a stage: the life of an offset between two topics.

Samples finish out of order. A crash repeats only unfinished work, and none twice (decisions 0002,
0009, 0026). The stations of an offset:

1. delivered: a poll brought its record, no done set covers it, and there is room in bytes.
2. noted: before a partition's first record is begun, a commit notes our try. The tries of owners
   that died there add up: after two, its records are begun one at a time (isolation); a record with
   three is a poison record and is set aside as a dead letter.
3. begun: the stage works on it, or it cannot be read and its outcome is a dead letter.
4. finished: its outputs wait (`pending`), behind the records that finished before it.
5. sent: one transaction with the outputs and, for each partition, {low watermark, done set, tries}.
   Until it has ended the loop collects finished records and does not poll. If it is aborted, its
   records are finished once more; if an output is refused, a dead letter takes its place.
6. committed: in the done set.
7. passed: below the low watermark.

A revoked partition's offsets are forgotten at any station: its new owner begins again at the
committed position. A worker that leaves alive takes its tries back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from contextlib import ExitStack, suppress
from typing import Protocol

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Event, Prompt
from rlstreams.schemas.tensor import Buffer
from rlstreams.streams.log.bus import Bus, Polled
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import AbortedError, StreamsError
from rlstreams.streams.log.record import Committed, Outgoing, Partition, RawRecord, Record
from rlstreams.streams.log.topics import DEAD_LETTERS
from rlstreams.streams.log.tracker import MAX_TRIES, Tracker
from rlstreams.streams.views.outputs import committed_by_outputs
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, dead_letter, refusal, sample_of
from rlstreams.workers.loop.pending import Finished, PendingCommits
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.runtime import IDLE_S

MAX_POLL = 256  # records of one poll
IN_HAND_BYTES = 256_000_000  # of inputs and outputs; above it no poll; one fetch may come on top
PATIENCE_S = 10.0  # in isolation, longest time from one begun record to the next

__all__ = ["Finished", "Stage", "StageLoop"]


class Stage(Protocol):
    """A role's work on its records; called from the loop's thread, never waits."""

    def room(self) -> int:
        """Number of further records that it would take now."""

    @property
    def most(self) -> int:
        """Most records that it ever holds at once."""

    def begin(self, record: Record[Event]) -> None:
        """Start work on a record.

        Raises:
            ValueError: not a record for this role, or an impossible field; it is dead-lettered.
        """

    def finished(self) -> Sequence[Finished]:
        """Records finished since the last call."""

    def give_up(self, partitions: Set[Partition]) -> None:
        """Stop work on records of partitions that went to another member.

        Records of them that still finish are dropped: their new owner does them.
        """

    def announcements(self) -> Sequence[Outgoing]:
        """Records that are not about an input; committed at once, with those finished by now."""

    @property
    def num_open(self) -> int:
        """Records begun and not yet returned as finished."""

    @property
    def may_join(self) -> bool:
        """Whether it can work on records; if it joined before, others would wait for its
        partitions."""

    @property
    def is_out(self) -> bool:
        """Whether it cannot work on the records that it has until others mend that, as a server."""

    def give_up_device(self) -> bool:
        """See `Sharing`."""

    def take_device(self) -> bool:
        """See `Sharing`."""

    def close(self) -> None:
        """Give up open work; release everything."""


class StageLoop:
    """A `Role` around a `Stage`: the group membership, the tracker and the transactions.

    Args:
        topic: the topic that it reads.
        reporter: of the stage.
        interval_s: longest time that finished records wait for their transaction.
        commits: requests of the stage's other thread to commit records, of inputs under way.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        stage: Stage,
        topic: str,
        *,
        reporter: Reporter,
        interval_s: float,
        commits: CommitRequests | None = None,
    ) -> None:
        self.is_paused = False
        self._commits = commits
        self._context = context
        self._schemas = bus.schemas()
        self._stage = stage
        self._reporter = reporter
        self._interval_s = interval_s
        self._producer = bus.producer(context.transactional_id)
        self._consumer = bus.consumer(context.role, [topic])
        self._consumer.before_revoked(self._take_tries_back)
        self._consumer.when_beyond(self._found_beyond)
        self._bus = bus
        self._num_partitions = bus.partitions(topic)
        self._tracker = Tracker()
        self._pending = PendingCommits(
            self._producer, self._consumer, self._tracker, self._unwritable
        )
        self._waiting: list[RawRecord] = []  # delivered, not begun
        self._window = min(stage.most, MAX_POLL)  # records that a worker holds at once
        self._num_isolated = 0  # records that are still to be begun alone
        self._begun_s = 0.0  # time at which the last record was begun
        self._has_joined = False  # whether it is in its group: a poll joins
        self._next_commit = 0.0
        self._drain_until: float | None = None

    def tick(self) -> None:
        """Poll, begin, collect, commit. While a transaction is under way, collect and wait."""
        if self._pending.is_under_way:
            self._pending.add(self._stage.finished())
            if not self._pending.settle(IDLE_S):
                return
        self._poll()
        to_note = self._begin_waiting()
        self._pending.add(self._stage.finished())
        announced = self._stage.announcements()
        # After announcements: a requested record may name a load, whose own record must come first.
        self._pending.announce(announced, self._commits.take() if self._commits else ())
        now = time.monotonic()
        is_due = now >= self._next_commit or self._drain_until is not None
        if self._pending.start(to_note, is_due=is_due):
            self._next_commit = now + self._interval_s
        self._pending.settle(0.0)

    def drain(self) -> None:
        """Take nothing new; work unfinished after `drain_s` stays in flight."""
        self._drain_until = time.monotonic() + self._context.config.deadlines.drain_s
        self._waiting = []

    def give_up_device(self) -> bool:
        """See `Sharing`."""
        return self._stage.give_up_device()

    def take_device(self) -> bool:
        """See `Sharing`."""
        return self._stage.take_device()

    @property
    def done(self) -> bool:
        """Whether it has drained."""
        if self._drain_until is None:
            return False
        return not self._has_work or time.monotonic() > self._drain_until

    @property
    def is_idle(self) -> bool:
        """Whether no record is begun, or waits to be begun or committed."""
        return not self._waiting and not self._has_work

    @property
    def _has_work(self) -> bool:
        return self._stage.num_open > 0 or self._pending.has_ready

    def close(self) -> None:
        """Leave the group; a worker that is done also reports its end and takes its tries back."""
        with ExitStack() as stack:  # if one fails, the others are still released
            for each in (self._producer, self._consumer, self._stage):
                stack.callback(each.close)
            if self.done:
                while not self._pending.settle(IDLE_S):
                    pass  # until its deadline
                self._take_tries_back(records=self._reporter.last_report())

    def _take_tries_back(
        self, partitions: Set[Partition] | None = None, records: Sequence[Outgoing] = ()
    ) -> None:
        """Leave only the tries of predecessors, which died, though a record may kill slowly.

        Called while no transaction is under way. If this one is aborted, our tries stay.
        """
        with suppress(AbortedError):
            tries = self._tracker.without_our_tries(partitions)
            self._producer.commit(records, tries, self._consumer)

    def _poll(self) -> None:
        max_bytes = IN_HAND_BYTES - self._tracker.num_bytes - self._pending.num_bytes
        room = min(self._stage.room(), MAX_POLL) - len(self._waiting)
        if max_bytes <= 0 or self._drain_until is not None or self.is_paused:
            room = 0
        timeout_s = IDLE_S
        if self._pending.has_ready:
            timeout_s = min(IDLE_S, max(0.0, self._next_commit - time.monotonic()))
        if self._commits is not None:  # a request wakes this wait, which it could not do in a poll
            self._commits.wait(timeout_s)
            timeout_s = 0.0
        self._has_joined = self._has_joined or self._stage.may_join
        if self._is_in_the_way:
            self._leave()
        if not self._has_joined:
            time.sleep(timeout_s)
            return
        reach(CrashPoint.POLL_BEFORE)
        polled = self._consumer.poll(max(0, room), timeout_s, max_bytes=max(1, max_bytes))
        reach(CrashPoint.POLL_AFTER)
        new = self._tracker.take(polled, self._consumer.positions())
        if polled.revoked:
            self._give_up(polled.revoked)
        self._look_at(polled)
        if self._drain_until is None:
            self._waiting += new
        self._consumer.pause(self._tracker.too_wide())

    @property
    def _is_in_the_way(self) -> bool:
        """Whether its records wait for what it lacks, while another member could work on them."""
        has_peers = 0 < len(self._tracker) < self._num_partitions
        return self._has_joined and has_peers and self._drain_until is None and self._stage.is_out

    def _leave(self) -> None:
        gone = self._consumer.leave()
        self._tracker.take(Polled(revoked=frozenset(gone)), {})
        self._give_up(gone)
        self._has_joined = False
        why = "it cannot work on its records; the group's other members do, until it can"
        self._context.log.warning("left_group", group=self._context.role, why=why)

    def _give_up(self, gone: Set[Partition]) -> None:
        self._waiting = [raw for raw in self._waiting if self._tracker.holds(raw)]
        self._stage.give_up(gone)

    def _found_beyond(self, partition: Partition, position: int) -> Committed:
        """Handle a position that cannot be ours: the log itself shows the records that are done."""
        found = committed_by_outputs(self._bus, partition)
        self._context.log.warning(
            "position_beyond_end",
            group=self._context.role,
            partition=str(partition),
            position=position,
            why=f"the log ends before it, so somebody else committed it, or the end is lost; what "
            f"the log has no output of is done from {found.offset} on",
        )
        return found

    def _look_at(self, polled: Polled) -> None:
        """Take in the commits of the partitions' last owners."""
        for partition, committed in polled.assigned.items():
            tracker = self._tracker[partition]
            if tracker.is_isolated:
                self._num_isolated = self._window
            if tracker.problem:
                self._context.log.warning(
                    "no_done_set",
                    group=self._context.role,
                    partition=str(partition),
                    position=committed.offset,
                    why=f"{tracker.problem}; what was finished above the position is done again",
                )

    def _begin_waiting(self) -> Set[Partition]:
        """Begin records that may be begun; partitions for which our try comes first."""
        waiting, tracker = self._waiting, self._tracker
        isolated = (raw for raw in waiting if tracker[raw.partition].is_isolated)
        if (raw := next(isolated, None)) is not None:
            return self._begin_alone(raw)
        self._waiting = []
        for raw in waiting:
            if tracker[raw.partition].is_noted:
                self._begin(raw)
            else:
                self._waiting.append(raw)
        return {raw.partition for raw in self._waiting}

    def _begin_alone(self, raw: RawRecord) -> Set[Partition]:
        """Begin a record of an isolated partition, once all records begun before are committed."""
        if self._has_work and time.monotonic() < self._begun_s + PATIENCE_S:
            return frozenset()
        tracker = self._tracker[raw.partition]
        if not tracker.is_noted and tracker.inherited < MAX_TRIES:
            # The report also shows the supervisor that this worker came so far.
            self._reporter.count(isolated=1)
            self._reporter.state(
                "isolating", f"{raw.position}, begun {tracker.inherited} times before"
            )
            return {raw.partition}
        self._waiting.remove(raw)
        self._num_isolated -= 1
        if tracker.is_noted:
            self._begin(raw)
        else:
            tracker.is_noted = True
            self._pending.add([self._poison(raw, tracker.inherited)])
        if self._num_isolated <= 0:
            self._tracker.end_isolation()
        return frozenset()

    def _begin(self, raw: RawRecord) -> None:
        self._begun_s = time.monotonic()
        event: Event | None = None
        try:
            record = self._decoded(raw)
            event = record.event
            self._stage.begin(record)
        except (ValueError, RecursionError) as err:  # RecursionError: JSON nested too deep
            letter = refusal(self._context, raw, event, err)
            self._pending.add([Finished(raw=raw, outputs=(outgoing(DEAD_LETTERS, letter),))])

    def _decoded(self, raw: RawRecord) -> Record[Event]:
        """Decode a record; one whose schema cannot be fetched is not counted as begun."""
        try:
            return decoded(raw, self._schemas)
        except StreamsError:
            with suppress(StreamsError):  # the first error is the one to report
                self._take_tries_back()
            raise

    def _poison(self, raw: RawRecord, tries: int) -> Finished:
        why = (
            f"the last {tries} workers that began it died, the last of them began it alone; "
            f"{self._context.worker} did not try again"
        )
        return self._dead(raw, Reason.KILLS_WORKER, why, raw.value)

    def _unwritable(self, raw: RawRecord, why: str) -> Finished:
        """The dead letter of a refused record, without its bytes: they might be refused too."""
        return self._dead(raw, Reason.TRANSACTION, why, b"")

    def _dead(self, raw: RawRecord, reason: Reason, why: str, value: Buffer) -> Finished:
        try:
            sample = sample_of(decoded(raw, self._schemas).event)
        except DecodeError:
            sample = None
        letter = dead_letter(
            self._context,
            raw._replace(value=value),
            sample,
            reason=reason,
            detail=why,
            permanent=isinstance(sample, Prompt),
        )
        return Finished(raw=raw, outputs=(outgoing(DEAD_LETTERS, letter),))
