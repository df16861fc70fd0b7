"""One whole transaction at a time, and its outcome: committed, aborted or unknown."""

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
_CALL_S = 5.0  # longest wait of one try of a call, which is repeated until the deadline
_ABORT_S = 10.0
# Time beyond a commit's own deadline in which an abort may end. A call that ignores its own timeout
# (librdkafka issue 5456) is left to its thread: an unknown outcome ends the process anyway.
_STUCK_S = 15.0
# The client reports a duplicate so; a record that we had never sent before may then be missing.
_UNPLACED = "the broker acknowledged a record without an offset, it may be missing from the log"


class KafkaProducer(Closing):
    """The port `Producer` on Kafka.

    Args:
        client: a transactional confluent producer, initialised.
        run: prefix of topics.
        transactional_id: with its prefix, for messages.
        commit_s: longest time of one commit.
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
        self._sending: Reports | None = None  # of the last transaction
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
        """See `Producer`; waits for the broker run on a thread of their own.

        The records are handed to the client before this returns: in a thread beside the role's,
        each record would cost both threads the interpreter's lock. Without records and positions
        nothing is sent, which proves nothing about the owner of the id.
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
            with self._judged(is_asked=failed is None):
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
    def _judged(self, *, is_asked: bool) -> Iterator[None]:
        """Turn the client's errors inside the block into the transaction's outcome.

        Args:
            is_asked: whether the broker may have been asked to commit.
        """
        try:
            yield
        except KafkaException as err:
            raise self._failed(error_of(err), is_asked=is_asked) from err
        except (FencedError, OutcomeUnknownError) as err:
            self._ended = err
            raise

    def _open(
        self, sending: Reports, records: Iterable[Outgoing], member: KafkaGroupConsumer | None
    ) -> Any:  # noqa: ANN401
        """Begin a transaction, and hand all records to the client; return the member's metadata."""
        self._sending = sending
        reach(CrashPoint.BEGIN_BEFORE)
        self._client.begin_transaction()
        reach(CrashPoint.BEGIN_AFTER)
        # Taken once, before all else: a poll in between could renew it, while another member owns
        # the partitions by then.
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
        """Send positions, then commit, if the reports show every record in the log."""
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
        """Abort although nothing failed: the log may lack a record, or have it twice."""
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
        """Repeat the same call while its error is retriable; never call another one instead.

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

    def _failed(self, error: Any, *, is_asked: bool) -> StreamsError:  # noqa: ANN401
        """Abort if that is possible; return the error that names the transaction's outcome.

        Before a commit is asked for an abort settles everything, also what the client refused by
        itself: a partition that it knows not to be there requires no abort in its words.
        """
        reported = self._sending.error if self._sending is not None else None
        cause = reported or error  # read before the abort purges the queue
        if cause.code() in _PURGED:
            cause = error  # a purged record's report: another record is the cause
        if not is_asked or error.txn_requires_abort() or error.code() == KafkaError._FATAL:
            # After a fatal error the abort fails too, with the reason that the first one lacks.
            reason = self._abort()
            if reason is None:
                return aborted_transaction(cause, self._id)
            error = reason
        self._ended = lost_transaction(error, self._id, cause)
        return self._ended

    def _abort(self) -> Any:  # noqa: ANN401
        """Abort; return None once that is done, else the error that prevents it."""
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
        # The client's close() tries to abort, which an ended producer cannot do: we only drop the
        # reference, and its connections end with it. The same holds while a commit is under way.
        is_free = self._ended is None and not self._is_busy
        client, self._client = self._client, None
        if is_free:
            _serve(client.close)


def _left_s(deadline: float) -> float:
    """Return seconds for one try. Never 0, with which the client would not wait at all."""
    return min(_CALL_S, max(0.01, deadline - time.monotonic()))


def _member(
    consumed: Mapping[Partition, Committed], consumer: GroupConsumer | None
) -> KafkaGroupConsumer | None:
    """Return the member that these positions belong to, after its check that they still do."""
    if not consumed:
        return None
    if not isinstance(consumer, KafkaGroupConsumer):
        raise TypeError(f"positions need the KafkaGroupConsumer they belong to, got {consumer!r}")
    consumer.check_owns(consumed.keys())
    return consumer


def _serve(call: Callable[[], object]) -> None:
    """Make a call that serves the client's callbacks.

    A producer that was fenced meanwhile raises a fatal error there, and the binding at times loses
    that on the way (`SystemError`, without a cause). The next transactional call raises the error
    again, so nothing is missed.
    """
    with suppress(SystemError):
        call()


class KafkaCommit:
    """The port `Commit` on Kafka: the role continues while the broker settles the transaction.

    Args:
        commit: waits for the broker; keeps to `commit_s` by itself, as far as the client does.
        transactional_id: for messages.
        commit_s: longest time of the commit.
    """

    def __init__(self, commit: Callable[[], None], transactional_id: str, commit_s: float) -> None:
        self._id = transactional_id
        self._deadline = time.monotonic() + commit_s + _STUCK_S
        self._answer: Future[None] = Future()
        # A daemon: a commit that never returns must not keep the process alive.
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
