"""Finished work of a stage, on its way into transactions; one bad record never blocks the rest.

A transaction is started and runs in the background; what finishes meanwhile waits for the next one.

An aborted transaction is retried after a pause. If it fails again it is split, until the record
that makes it fail is isolated. That record becomes a dead letter (`transaction`): at once
if the broker says that it can never be written, else after MAX_ABORTS tries, and only if another
transaction went through meanwhile. If none does, the fault is not with a record: the process ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.streams.log.bus import Commit, GroupConsumer, Producer
from rlstreams.streams.log.errors import AbortedError, BrokerError, RefusedError
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.tracker import Tracker

COMMIT_BYTES = 64_000_000  # of one transaction; one larger record travels alone
MAX_ABORTS = 5  # in a row, before the process gives up and starts again
ABORT_PAUSE_S = 0.05  # doubles with every abort in a row


@dataclass(slots=True, kw_only=True)  # not frozen: every sample is one, and that costs 0.4 us
class Finished:
    """One input that is done with, and what came of it; not changed afterwards."""

    raw: RawRecord
    outputs: tuple[Outgoing, ...] = ()
    num_bytes: int = field(init=False)  # of the outputs; summed once, asked several times

    def __post_init__(self) -> None:
        outputs = self.outputs
        self.num_bytes = len(outputs[0]) if len(outputs) == 1 else sum(map(len, outputs))


# The letter that takes the place of outputs that cannot be written: (what, why, with its bytes).
Bury = Callable[[Finished, str, bool], Finished]


class Outbox:
    """Commits announcements and finished records through one producer.

    Args:
        tracker: of the records that are finished here.
        bury: makes the dead letter of a record whose outputs cannot be written.
    """

    def __init__(
        self, producer: Producer, consumer: GroupConsumer, tracker: Tracker, bury: Bury
    ) -> None:
        self._producer = producer
        self._consumer = consumer
        self._tracker = tracker
        self._bury = bury
        self._unsent: list[Outgoing] = []
        self._ready: list[Finished] = []
        self._num_due = 0  # of them, from the front: those that the last `commit` is about
        self._flight: tuple[Sequence[Finished], Commit] | None = None  # the front of what is ready
        self._aborts = 0  # in a row
        self._not_before_s = 0.0
        self._limit: int | None = None  # records per transaction, while one of them is searched
        self._alone: dict[Position, int] = {}  # aborts of a record that was alone in them
        self._buried: dict[Position, int] = {}  # how often its outputs were replaced
        self._went_through = False  # a transaction, since the first abort of a record alone
        self.num_bytes = 0  # of what is ready

    @property
    def is_in_flight(self) -> bool:
        """Whether a transaction is under way: nothing may poll until `settle` says True."""
        return self._flight is not None

    @property
    def is_empty(self) -> bool:
        """Nothing is left to commit."""
        return not (self._ready or self._unsent)

    @property
    def has_ready(self) -> bool:
        """Whether finished records wait."""
        return bool(self._ready)

    @property
    def is_waiting(self) -> bool:
        """Whether it pauses after an abort."""
        return time.monotonic() < self._not_before_s

    def add(self, finished: Sequence[Finished]) -> None:
        """To be committed with the next `commit`."""
        self._ready += finished
        self.num_bytes += sum(done.num_bytes for done in finished)

    def announce(self, records: Sequence[Outgoing]) -> bool:
        """Commit records that are not about an input; False: aborted, they are kept for later."""
        self._unsent += records
        if not self._unsent:
            return True
        if self.is_waiting:
            return False
        try:
            self._producer.commit(self._unsent)
        except AbortedError as err:
            self._count_abort(err)
            return False
        self._unsent = []
        self._succeed()
        return True

    def position(self, positions: Mapping[Partition, Committed]) -> bool:
        """Commit positions alone; False: aborted, poll before it is tried again."""
        if self.is_waiting:
            return False
        try:
            self._producer.commit([], positions, self._consumer)
        except AbortedError as err:
            self._count_abort(err)
            return False
        self._succeed()
        return True

    def commit(self) -> None:
        """Start to commit what is finished and still ours; `settle` says when that is over.

        Raises:
            BrokerError: the broker refused for a reason that lies in no record, or nothing but
                aborts came MAX_ABORTS times.
        """
        # A revoked partition's work is dropped: its new owner does it.
        self._keep([done for done in self._ready if self._tracker.holds(done.raw)])
        self._num_due = len(self._ready)
        self._start()
        self.settle(0.0)

    def settle(self, timeout_s: float) -> bool:
        """Whether nothing is under way, after at most `timeout_s`; what an abort left stays.

        One transaction follows the other until all that was ready at `commit` went through. What
        was added since waits for the next one: it may name what is still to be announced, or be of
        a partition that is ours no longer.

        Raises:
            BrokerError: see `commit`.
            FencedError, OutcomeUnknownError: final for this process.
        """
        while self._flight is not None:
            batch, under_way = self._flight
            if not under_way.wait(timeout_s):
                return False
            self._flight = None
            if self._went(batch, under_way):
                self._keep(self._ready[len(batch) :])
                self._num_due -= len(batch)
                self._start()
        return True

    def _start(self) -> None:
        if not self._num_due or self.is_waiting:
            return
        batch = self._ready[: self._num_due]
        if self._limit is not None or self.num_bytes > COMMIT_BYTES:
            batch = _first_batch(batch, self._limit)
        outputs = [output for done in batch for output in done.outputs]
        positions = self._tracker.after([done.raw for done in batch])
        try:
            self._flight = (batch, self._producer.start(outputs, positions, self._consumer))
        except AbortedError as err:
            self._aborted(batch, err)

    def _went(self, batch: Sequence[Finished], under_way: Commit) -> bool:
        try:
            under_way.result()
        except RefusedError as err:
            self._refused(batch, err)
            return False
        except AbortedError as err:
            # Nothing of it happened. The next poll tells whether the partitions are ours still.
            self._aborted(batch, err)
            return False
        self._tracker.commit([done.raw for done in batch])
        self._succeed()
        if self._limit is not None:
            self._widen(batch)
        return True

    def _widen(self, batch: Sequence[Finished]) -> None:
        """The search goes on behind this batch; it is over once all that was ready is through."""
        assert self._limit is not None
        self._limit = 2 * self._limit if len(batch) < len(self._ready) else None
        for done in batch:
            self._alone.pop(done.raw.position, None)
            self._buried.pop(done.raw.position, None)

    def _refused(self, batch: Sequence[Finished], err: RefusedError) -> None:
        if len(batch) > 1:
            self._limit = len(batch) // 2
        else:
            self._replace(batch[0], err)

    def _aborted(self, batch: Sequence[Finished], err: AbortedError) -> None:
        if len(batch) > 1:
            self._count_abort(err)
            if self._aborts > 1:
                self._limit = len(batch) // 2
            return
        position = batch[0].raw.position
        if position not in self._alone:
            self._went_through = False
        self._alone[position] = self._alone.get(position, 0) + 1
        self._limit = 1
        if self._alone[position] >= MAX_ABORTS and self._went_through:
            self._replace(batch[0], err)
        else:
            self._count_abort(err)

    def _replace(self, done: Finished, err: AbortedError | RefusedError) -> None:
        """Replace a record by its dead letter: with its bytes or, if those are refused, without."""
        position = done.raw.position
        times = self._buried.get(position, 0)
        if times == 2:
            raise BrokerError(f"not even a dead letter for {position} can be written: {err}")
        self._buried[position] = times + 1
        self._alone.pop(position, None)
        self._limit = 1
        letter = self._bury(done, str(err), times == 0)
        self._keep([letter, *self._ready[1:]])

    def _keep(self, ready: list[Finished]) -> None:
        if len(ready) != len(self._ready) or (ready and ready[0] is not self._ready[0]):
            self.num_bytes = sum(done.num_bytes for done in ready)
        self._ready = ready

    def _succeed(self) -> None:
        self._aborts = 0
        self._went_through = True

    def _count_abort(self, err: AbortedError) -> None:
        self._aborts += 1
        self._not_before_s = time.monotonic() + ABORT_PAUSE_S * 2**self._aborts
        if self._aborts >= MAX_ABORTS:
            raise BrokerError(f"{self._aborts} transactions in a row were aborted: {err}") from err


def _first_batch(finished: Sequence[Finished], limit: int | None) -> list[Finished]:
    """As many from the front as one transaction takes."""
    batch: list[Finished] = []
    size = 0
    for done in finished[:limit]:
        size += done.num_bytes
        if batch and size > COMMIT_BYTES:
            break
        batch.append(done)
    return batch
