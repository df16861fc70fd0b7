"""Finished work of a stage on its way into transactions; one bad record never blocks the rest.

A transaction takes everything that is ready, and runs in the background; work that finishes
meanwhile waits for the next one. An aborted transaction is sent again after a pause; after
MAX_ABORTS in a row the process ends. If the broker reports that a record can never be written, the
records of that transaction travel alone, and one that is refused again becomes a dead letter
(`transaction`).

Records that a coroutine waits for (`Awaited`) come between: they belong to an input that is not
finished yet, and their transaction holds the unchanged position of its partition, so that a worker
that has lost the partition cannot commit them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlstreams.streams.log.bus import Commit, GroupConsumer, Producer
from rlstreams.streams.log.errors import AbortedError, BrokerError, RefusedError
from rlstreams.streams.log.record import Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.tracker import Tracker

COMMIT_BYTES = 64_000_000  # of one transaction; one larger record travels alone
MAX_ABORTS = 5  # in a row, before the process gives up and starts again
ABORT_PAUSE_S = 0.05  # doubles with every abort in a row


@dataclass(slots=True, kw_only=True)  # not frozen: every sample is one, and that costs 0.4 us
class Finished:
    """One finished input with its outputs; not changed afterwards."""

    raw: RawRecord
    outputs: tuple[Outgoing, ...] = ()
    num_bytes: int = field(init=False)  # of the outputs; summed once, used several times

    def __post_init__(self) -> None:
        outputs = self.outputs
        self.num_bytes = len(outputs[0]) if len(outputs) == 1 else sum(map(len, outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Records of an input under way; a coroutine goes on once they are committed, and not before.

    They are dropped, without a call, when the input's partition goes to another member.
    """

    raw: RawRecord
    outputs: tuple[Outgoing, ...]
    committed: Callable[[], None]  # called on the role's thread, once
    is_progress: bool = True  # work that no other worker does again, should this one die


# Makes the dead letter in place of refused outputs, from input and reason.
SetAside = Callable[[RawRecord, str], Finished]


@dataclass(frozen=True, slots=True)
class _Transaction:
    commit: Commit
    batch: Sequence[Finished]  # the front of `_ready`
    num_announced: int
    awaited: Sequence[Awaited]  # the front of `_awaited`
    begun: Collection[Partition]


class _Aborts:
    """Count of transactions that were aborted in a row."""

    def __init__(self) -> None:
        self.num = 0

    def pause_s(self, err: AbortedError) -> float:
        """Count one; the pause before the next try. Raises BrokerError: it was the last."""
        self.num += 1
        if self.num >= MAX_ABORTS:
            raise BrokerError(f"{self.num} transactions in a row were aborted: {err}") from err
        return float(ABORT_PAUSE_S * 2**self.num)


class PendingCommits:
    """Commits announcements, tries and finished records through one producer.

    Args:
        tracker: of the records that finish here.
        set_aside: makes the dead letter of a record whose outputs cannot be written.
    """

    def __init__(
        self, producer: Producer, consumer: GroupConsumer, tracker: Tracker, set_aside: SetAside
    ) -> None:
        self._producer = producer
        self._consumer = consumer
        self._tracker = tracker
        self._set_aside = set_aside
        self._announced: list[Outgoing] = []
        self._awaited: list[Awaited] = []
        self._ready: list[Finished] = []
        self._under_way: _Transaction | None = None
        self._num_alone = 0  # records, from the front, that travel alone: one was refused
        self._is_set_aside = False  # the first of them: its dead letter is on its way
        self._aborts = _Aborts()
        self._not_before_s = 0.0
        self.num_bytes = 0  # of the finished records

    @property
    def is_under_way(self) -> bool:
        """Whether a transaction is under way: no poll is allowed until `settle` returns True."""
        return self._under_way is not None

    @property
    def has_ready(self) -> bool:
        """Whether finished records wait, or are under way."""
        return bool(self._ready)

    def add(self, finished: Sequence[Finished]) -> None:
        """Queue finished records for the next transaction."""
        self._ready += finished
        self.num_bytes += sum(done.num_bytes for done in finished)

    def announce(self, records: Sequence[Outgoing], awaited: Sequence[Awaited]) -> None:
        """Queue records that finish no input; they are committed no later than the records ready
        now.

        Awaited records come behind the others of the same transaction.
        """
        self._announced += records
        self._awaited += (one for one in awaited if not self._is_idle(one))

    def start(self, begun: Collection[Partition] = (), *, is_due: bool = True) -> bool:
        """Start a transaction of all records that are queued and still ours; `settle` ends it.

        Args:
            begun: partitions whose oldest record is to be begun next: our try is committed first.
            is_due: whether finished records alone are worth a transaction now.

        Returns:
            Whether it has finished records, and no more are left.
        """
        has_more = bool(self._announced or self._awaited or begun)
        if not (has_more or (self._ready and is_due)) or time.monotonic() < self._not_before_s:
            return False
        self._keep_ours()
        has_more = bool(self._announced or self._awaited or begun)
        batch = [] if self._num_alone and has_more else self._first_batch()
        if not (batch or has_more):
            return False
        awaited = self._awaited[:]
        outputs = [
            *self._announced,
            *(output for one in awaited for output in one.outputs),
            *(output for done in batch for output in done.outputs),
        ]
        positions = self._tracker.after([done.raw for done in batch], begun, _held(awaited))
        try:
            commit = self._producer.start(outputs, positions, self._consumer)
        except AbortedError as err:
            self._not_before_s = time.monotonic() + self._aborts.pause_s(err)
            return False
        self._under_way = _Transaction(commit, batch, len(self._announced), awaited, begun)
        return bool(batch) and len(batch) == len(self._ready)

    def settle(self, timeout_s: float) -> bool:
        """Whether no transaction is under way, after at most `timeout_s`; aborted records stay
        queued.

        Raises:
            BrokerError: the broker refused for a reason that lies in no record, or nothing but
                aborts came MAX_ABORTS times.
            FencedError, OutcomeUnknownError: final for this process.
        """
        sent = self._under_way
        if sent is None:
            return True
        if not sent.commit.wait(timeout_s):
            return False
        self._under_way = None
        try:
            sent.commit.result()
        except RefusedError as err:
            self._refused(sent, err)
        except AbortedError as err:
            # Nothing of it was committed. The next poll shows whether the partitions are still
            # ours.
            self._not_before_s = time.monotonic() + self._aborts.pause_s(err)
        else:
            self._succeeded(sent)
        return True

    def _is_idle(self, one: Awaited) -> bool:
        """Whether it only notes progress on an input that no worker has died of."""
        is_note = one.is_progress and not one.outputs
        return (
            is_note and self._tracker.holds(one.raw) and not self._tracker[one.raw.partition].tries
        )

    def _first_batch(self) -> list[Finished]:
        """Ready records for one transaction, as many as it takes."""
        if self._num_alone:
            return self._ready[:1]
        if self.num_bytes <= COMMIT_BYTES:
            return self._ready[:]
        size = 0
        for index, done in enumerate(self._ready):
            size += done.num_bytes
            if index and size > COMMIT_BYTES:
                return self._ready[:index]
        return self._ready[:]

    def _keep_ours(self) -> None:
        """Drop the work of revoked partitions: their new owners do it."""
        ready = [done for done in self._ready if self._tracker.holds(done.raw)]
        if len(ready) != len(self._ready):
            self._ready, self._is_set_aside = ready, False
            self.num_bytes = sum(done.num_bytes for done in ready)
        self._awaited = [one for one in self._awaited if self._tracker.holds(one.raw)]

    def _succeeded(self, sent: _Transaction) -> None:
        self._tracker.commit([done.raw for done in sent.batch], sent.begun, _held(sent.awaited))
        self._aborts = _Aborts()
        del self._announced[: sent.num_announced]
        if sent.batch:
            del self._ready[: len(sent.batch)]
            self.num_bytes -= sum(done.num_bytes for done in sent.batch)
            self._num_alone = max(0, self._num_alone - len(sent.batch))
            self._is_set_aside = False
        del self._awaited[: len(sent.awaited)]
        for one in sent.awaited:
            one.committed()

    def _refused(self, sent: _Transaction, err: RefusedError) -> None:
        if not sent.batch:
            raise err
        if not self._num_alone:
            self._num_alone = len(sent.batch)
            return
        raw = sent.batch[0].raw
        if self._is_set_aside:
            raise BrokerError(f"not even a dead letter for {raw.position} can be written: {err}")
        self._is_set_aside = True
        self._ready[0] = self._set_aside(raw, str(err))
        self.num_bytes = sum(done.num_bytes for done in self._ready)


def _held(awaited: Sequence[Awaited]) -> dict[Partition, bool]:
    """Partitions that records belong to, and whether there was progress on them."""
    held: dict[Partition, bool] = {}
    for one in awaited:
        held[one.raw.partition] = held.get(one.raw.partition, False) or one.is_progress
    return held


def commit(producer: Producer, records: Sequence[Outgoing]) -> Sequence[Position]:
    """Commit one transaction of a role without inputs, again while it is aborted; none if empty.

    Returns:
        Position of each record.

    Raises:
        BrokerError: it was aborted MAX_ABORTS times.
    """
    aborts = _Aborts()
    while True:
        try:
            return producer.commit(records)
        except AbortedError as err:
            time.sleep(aborts.pause_s(err))
