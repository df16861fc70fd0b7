"""The loop of every role that turns records of one topic into records of another.

Samples finish out of order. One transaction per commit interval carries the outputs of what
finished and the positions {low watermark, done set} of their inputs, so a crash repeats only what
was not finished, and nothing twice (design, section 5, Rollout).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from schemas import DecodeError
from schemas.events import Event
from streams.bus import Bus
from streams.codec import decoded, outgoing
from streams.errors import AbortedError, BrokerError
from streams.record import Outgoing, RawRecord, Record
from streams.topics import DEAD_LETTERS
from streams.tracker import Tracker
from workers.context import Context
from workers.dead_letters import dead_letter, sample_of
from workers.runtime import IDLE_S

COMMIT_BYTES = 64_000_000  # of one transaction; one larger record travels alone
MAX_POLL = 256  # records of one poll
MAX_ABORTS = 5  # in a row, before the process gives up and starts again


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One input that is done with, and what came of it."""

    raw: RawRecord
    outputs: tuple[Outgoing, ...] = ()


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
    """A `Role` around a `Stage`: the group membership, the tracker and the transactions."""

    def __init__(self, context: Context, bus: Bus, stage: Stage, topic: str) -> None:
        self._context = context
        self._stage = stage
        self._interval_s = context.config.rollout.commit_interval_s
        self._drain_s = context.config.deadlines.drain_s
        self._producer = bus.producer(context.transactional_id)
        self._consumer = bus.consumer(context.role, [topic])
        self._tracker = Tracker()
        self._ready: list[Finished] = []
        self._next_commit = 0.0
        self._aborts = 0
        self._drain_until: float | None = None

    def turn(self) -> None:
        """Poll, begin, collect, commit."""
        self._announce()
        self._take()
        self._ready += self._stage.finished()
        now = time.monotonic()
        if self._ready and (now >= self._next_commit or self._drain_until is not None):
            self._announce()
            self._commit()
            self._next_commit = now + self._interval_s

    def drain(self) -> None:
        """Take nothing new; what is unfinished after `drain_s` stays in flight."""
        self._drain_until = time.monotonic() + self._drain_s

    @property
    def done(self) -> bool:
        """Drained."""
        if self._drain_until is None:
            return False
        nothing_left = self._stage.num_open == 0 and not self._ready
        return nothing_left or time.monotonic() > self._drain_until

    def close(self) -> None:
        """Leave the group; a clean end says so."""
        if self.done:
            with suppress(AbortedError):
                self._producer.commit(self._stage.farewell())
        self._stage.close()
        self._consumer.close()
        self._producer.close()

    def _take(self) -> None:
        room = 0 if self._drain_until is not None else min(self._stage.room(), MAX_POLL)
        polled = self._consumer.poll(room, IDLE_S)
        for raw in self._tracker.take(polled, self._consumer.positions()):
            self._begin(raw)
        self._consumer.pause(self._tracker.too_wide())

    def _begin(self, raw: RawRecord) -> None:
        event: Event | None = None
        try:
            record = decoded(raw)
            event = record.event
            self._stage.begin(record)
        except ValueError as err:
            reason = "decode" if isinstance(err, DecodeError) else "validation"
            letter = dead_letter(
                self._context,
                raw,
                sample_of(event),
                reason=reason,
                detail=str(err),
                permanent=True,
            )
            self._ready.append(Finished(raw=raw, outputs=(outgoing(DEAD_LETTERS, letter),)))

    def _announce(self) -> None:
        announcements = list(self._stage.announcements())
        while announcements:
            try:
                self._producer.commit(announcements)
                announcements = []
            except AbortedError as err:
                self._count_abort(err)

    def _commit(self) -> None:
        # A revoked partition's work is dropped: its new owner does it.
        ours = [done for done in self._ready if self._tracker.holds(done.raw)]
        for batch in _batches(ours):
            raws = [done.raw for done in batch]
            outputs = [output for done in batch for output in done.outputs]
            try:
                self._producer.commit(outputs, self._tracker.after(raws), self._consumer)
            except AbortedError as err:
                # Nothing of it happened. The next poll tells whether the partitions are ours still.
                self._count_abort(err)
                self._ready = ours
                return
            self._tracker.commit(raws)
            self._aborts = 0
            ours = ours[len(batch) :]
        self._ready = []

    def _count_abort(self, err: AbortedError) -> None:
        self._aborts += 1
        if self._aborts >= MAX_ABORTS:
            raise BrokerError(f"{self._aborts} transactions in a row were aborted: {err}") from err


def _batches(finished: Sequence[Finished]) -> Sequence[Sequence[Finished]]:
    batches: list[list[Finished]] = []
    size = 0
    for done in finished:
        num_bytes = sum(len(output) for output in done.outputs)
        if not batches or size + num_bytes > COMMIT_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(done)
        size += num_bytes
    return batches
