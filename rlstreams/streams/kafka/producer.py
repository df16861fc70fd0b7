"""One whole transaction at a time, and how it ended: committed, aborted or unknown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rlstreams.streams.kafka.consumer import KafkaGroupConsumer
from rlstreams.streams.kafka.errors import aborted_transaction, error_of, lost_transaction
from rlstreams.streams.kafka.reports import Reports
from rlstreams.streams.log.bus import Closing, GroupConsumer
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import (
    AbortedError,
    FencedError,
    OutcomeUnknownError,
    StreamsError,
)
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position

_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
_CALL_S = 5.0  # one try of a call, or what is left until the deadline; repeated until then
_ABORT_S = 10.0
# Beyond a commit's own deadline, in which an abort may end. A call that ignores its own timeout
# (librdkafka issue 5456) is left to its thread: an unknown outcome ends the process anyway.
_STUCK_S = 15.0
# The client's word for "duplicate": what we had sent never before may be missing from the log.
_UNPLACED = "the broker acknowledged a record without an offset, it may be missing from the log"


class KafkaProducer(Closing):
    """The port `Producer` on Kafka.

    Args:
        client: a transactional confluent producer, initialised.
        run: prefix of topics.
        transactional_id: with its prefix, for messages.
        commit_s: how long one commit may take.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401
        *,
        run: str,
        transactional_id: str,
        commit_s: float,
    ) -> None:
        self._client = client
        self._prefix = f"{run}."
        self._id = transactional_id
        self._commit_s = commit_s
        self._sending: Reports | None = None  # of the transaction that was begun last
        self._ended: StreamsError | None = None
        self._started: KafkaCommit | None = None
        self._closed = False

    def commit(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Sequence[Position]:
        """See `Producer`."""
        commit = self.start(records, consumed, consumer)
        while not commit.wait(_CALL_S):
            pass
        commit.result()
        return self._sending.positions if self._sending is not None and records else []

    def start(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> KafkaCommit:
        """See `Producer`; what waits for the broker does so on a thread of its own.

        The records are handed to the client before this returns: beside the role's thread that
        would cost both of them the interpreter's lock with every record. Without records and
        positions nothing is sent, which proves nothing about who owns the id.
        """
        if self._ended is not None:
            raise self._ended
        if self._is_busy:
            raise RuntimeError(f"transactional id {self._id}: a commit is under way; wait for it")
        positions = consumed or {}
        member = _member(positions, consumer)
        deadline = time.monotonic() + self._commit_s
        sending = Reports(partial(self._enqueue, deadline), self._prefix)
        metadata, failed = None, None
        if records or positions:
            try:
                metadata = self._open(sending, records, member)
            except (KafkaException, StreamsError) as err:
                failed = err

        def end() -> None:
            with self._judged():
                if failed is not None:
                    raise failed
                if records or positions:
                    self._settle(sending, positions, metadata, deadline)

        self._started = KafkaCommit(end, self._id, self._commit_s)
        return self._started

    @property
    def _is_busy(self) -> bool:
        return self._started is not None and not self._started.wait(0)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """What the client raises inside, as how the transaction ended."""
        try:
            yield
        except KafkaException as err:
            raise self._failed(error_of(err)) from err
        except (FencedError, OutcomeUnknownError) as err:
            self._ended = err
            raise

    def _open(
        self, sending: Reports, records: Iterable[Outgoing], member: KafkaGroupConsumer | None
    ) -> Any:  # noqa: ANN401
        """Begin, and hand all records to the client; returns the member's metadata."""
        self._sending = sending
        reach(CrashPoint.BEGIN_BEFORE)
        self._client.begin_transaction()
        reach(CrashPoint.BEGIN_AFTER)
        # Taken once, before anything else: a poll in between could renew it for partitions
        # that another member owns by then.
        metadata = member.group_metadata() if member is not None else None
        sending.send(records)
        reach(CrashPoint.SEND_AFTER)
        return metadata

    def _settle(
        self,
        sending: Reports,
        consumed: Mapping[Partition, Committed],
        metadata: Any,  # noqa: ANN401
        deadline: float,
    ) -> None:
        """Positions, then the commit, if the reports show that all of it is in the log."""
        if metadata is not None:
            offsets = [
                TopicPartition(self._prefix + p.topic, p.number, at.offset, at.metadata)
                for p, at in consumed.items()
            ]
            send = self._client.send_offsets_to_transaction
            reach(CrashPoint.OFFSETS_BEFORE)
            self._again(lambda left_s: send(offsets, metadata, left_s), deadline)
            reach(CrashPoint.OFFSETS_AFTER)
        _serve(lambda: self._client.flush(_left_s(deadline)))
        if not (sending.error or sending.is_whole or len(self._client)):
            raise self._retracted()
        reach(CrashPoint.COMMIT_BEFORE)
        self._again(self._client.commit_transaction, deadline)
        reach(CrashPoint.COMMIT_AFTER)
        _serve(lambda: self._client.poll(0))
        if not sending.is_whole:
            raise OutcomeUnknownError(f"transactional id {self._id}: {_UNPLACED}")

    def _retracted(self) -> StreamsError:
        """Abort although nothing failed: of a record the log may have nothing, or two."""
        reason = self._abort()
        if reason is not None:
            return lost_transaction(reason, self._id)
        return AbortedError(f"transactional id {self._id}: aborted ({_UNPLACED})")

    def _enqueue(
        self,
        deadline: float,
        *message: Any,  # noqa: ANN401
        **settings: Any,  # noqa: ANN401
    ) -> None:
        while True:
            try:
                self._client.produce(*message, **settings)
            except BufferError:  # let it send
                if time.monotonic() >= deadline:
                    raise self._too_late(None) from None
                _serve(lambda: self._client.poll(0.05))
            else:
                return

    def _again(self, call: Callable[[float], object], deadline: float) -> None:
        """The same call while its error is retriable; never another one instead.

        Args:
            call: takes the seconds after which this try gives up.
        """
        while True:
            try:
                call(_left_s(deadline))
            except KafkaException as err:
                error = error_of(err)
                if not error.retriable():
                    raise
                if time.monotonic() >= deadline:
                    raise self._too_late(error) from err
            else:
                return
            time.sleep(0.02)

    def _too_late(self, error: Any) -> OutcomeUnknownError:  # noqa: ANN401
        said = "the client is stuck" if error is None else f"last: {error.str()}"
        return OutcomeUnknownError(
            f"transactional id {self._id}: no answer to a commit within {self._commit_s:g} s "
            f"({said}); restart this process, the start settles it"
        )

    def _failed(self, error: Any) -> StreamsError:  # noqa: ANN401
        """Abort if that is possible, and say how the transaction ended."""
        reported = self._sending.error if self._sending is not None else None
        cause = reported or error  # before the abort purges what is left
        if cause.code() in _PURGED:
            cause = error  # thrown out of the queue because of what befell another record
        if error.txn_requires_abort() or error.code() == KafkaError._FATAL:
            # After a fatal error the abort fails too, with the reason that the first one lacks.
            reason = self._abort()
            if reason is None:
                return aborted_transaction(cause, self._id)
            error = reason
        self._ended = lost_transaction(error, self._id)
        return self._ended

    def _abort(self) -> Any:  # noqa: ANN401
        """None once aborted, else the error that prevents it."""
        try:
            self._again(self._client.abort_transaction, time.monotonic() + _ABORT_S)
        except KafkaException as err:
            return error_of(err)
        except OutcomeUnknownError as err:
            return error_of(err.__cause__) if isinstance(err.__cause__, KafkaException) else None
        return None

    def close(self) -> None:
        """Release the connections; idempotent. An unsettled transaction is left to the broker."""
        if self._closed:
            return
        self._closed = True
        # The client's close() tries to abort, which a producer that has ended cannot do: it is
        # only let go of, and its connections end with it. So is one whose commit is under way.
        is_free = self._ended is None and not self._is_busy
        client, self._client = self._client, None
        if is_free:
            _serve(client.close)


def _left_s(deadline: float) -> float:
    """Seconds for one try. Never 0, which the client takes for a question without a wait."""
    return min(_CALL_S, max(0.01, deadline - time.monotonic()))


def _member(
    consumed: Mapping[Partition, Committed], consumer: GroupConsumer | None
) -> KafkaGroupConsumer | None:
    """The member whose positions these are; it checks that they still are."""
    if not consumed:
        return None
    if not isinstance(consumer, KafkaGroupConsumer):
        raise TypeError(f"positions need the KafkaGroupConsumer they belong to, got {consumer!r}")
    consumer.check_owns(consumed.keys())
    return consumer


def _serve(call: Callable[[], object]) -> None:
    """A call that serves the client's callbacks.

    A producer that was fenced meanwhile has a fatal error to raise from there, and the binding at
    times loses it on the way (`SystemError`, without a cause). The next transactional call raises
    it again, so nothing is missed.
    """
    with suppress(SystemError):
        call()


class KafkaCommit:
    """The port `Commit` on Kafka: the role continues while the broker settles the transaction.

    Args:
        commit: what waits for the broker; keeps to `commit_s` by itself, as far as the client does.
        transactional_id: for messages.
        commit_s: how long it may take.
    """

    def __init__(self, commit: Callable[[], None], transactional_id: str, commit_s: float) -> None:
        self._id = transactional_id
        self._deadline = time.monotonic() + commit_s + _STUCK_S
        self._answer: Future[None] = Future()
        # A daemon: one that never returns must not keep the process.
        threading.Thread(target=self._run, args=(commit,), name="commit", daemon=True).start()

    def _run(self, commit: Callable[[], None]) -> None:
        try:
            commit()
        except BaseException as err:  # noqa: BLE001  (raised by `result`)
            self._answer.set_exception(err)
        else:
            self._answer.set_result(None)

    def wait(self, timeout_s: float) -> bool:
        """See `Commit`."""
        if self._answer.done():
            return True
        if wait([self._answer], timeout_s).done:
            return True
        if time.monotonic() > self._deadline:
            raise OutcomeUnknownError(
                f"transactional id {self._id}: its commit does not return, long after its deadline "
                "(the client is stuck); restart this process, the start settles it"
            )
        return False

    def result(self) -> None:
        """See `Commit`."""
        self._answer.result(0)
