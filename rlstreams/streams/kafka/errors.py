"""Table of Kafka errors and their meaning for us, so that no caller reads error codes.

Transactions follow librdkafka's contract (`KafkaError.retriable`, `txn_requires_abort`, `fatal`):
retriable means the same call again, never a new transaction instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from rlstreams.streams.log.errors import (
    AbortedError,
    BrokerError,
    FencedError,
    OutcomeUnknownError,
    RefusedError,
    StreamsError,
)

T = TypeVar("T")

# Connections that come and go, coordinators that move: they pass by themselves, or are an outage.
NOISE = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._DESTROY_BROKER,  # a node answers under another name, or is not named any more
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
    }
)
OFFSET_GONE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
NO_TOPIC = frozenset(
    {
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
# Errors for which a request for a partition's offsets is repeated: without a leader, as between a
# broker's death and its return, the client does not know the partition. A topic that is gone is
# reported among the messages.
NOT_YET_KNOWN = NOISE | NO_TOPIC
# Reported in other ways (callbacks, positions).
IGNORED = frozenset({KafkaError._PARTITION_EOF, KafkaError._MAX_POLL_EXCEEDED})
_FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        getattr(KafkaError, "PRODUCER_FENCED", KafkaError._FENCED),
    }
)
_NO_PROTOCOL = frozenset({KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION})
# Aborted, and sending the same batch again would be refused again.
_REFUSED = NO_TOPIC | {
    KafkaError.OFFSET_METADATA_TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
}
# Aborted because one of its records can never be written.
_UNFIT = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
    }
)


def error_of(exception: KafkaException) -> Any:  # noqa: ANN401  (KafkaError has no stubs)
    """Return the `KafkaError` that the client's exception carries."""
    return exception.args[0]


def broker_error(error: Any, doing: str, bootstrap: str) -> BrokerError:  # noqa: ANN401
    """Return the error for a refusal of the broker, with a cure where we know one."""
    hint = ""
    if error.code() in _NO_PROTOCOL:
        hint = "; it needs group.protocol=consumer (KIP-848): Apache Kafka 4.0 or newer"
    return BrokerError(f"Kafka at {bootstrap}: {doing}: {error.name()}: {error.str()}{hint}")


def lost_transaction(
    error: Any,  # noqa: ANN401
    transactional_id: str,
    cause: Any = None,  # noqa: ANN401
) -> StreamsError:
    """Return the error that ends a producer after a failure that no abort cures.

    Args:
        cause: the broker's refusal of a record before it, a missing right for instance.
    """
    said = f"{error.name()}: {error.str()}"
    if cause is not None and cause.code() != error.code():
        said += f", after a record was refused: {cause.name()}: {cause.str()}"
    if error.code() in _FENCED:
        return FencedError(
            f"transactional id {transactional_id} is fenced: another producer of this id started, "
            f"or this one stalled longer than the transaction timeout ({said})"
        )
    return OutcomeUnknownError(
        f"transactional id {transactional_id}: the outcome of its last commit is unknown ({said}); "
        "restart this process, the start settles it"
    )


def aborted_transaction(error: Any, transactional_id: str) -> StreamsError:  # noqa: ANN401
    """Return the error for the caller of an aborted transaction."""
    said = f"transactional id {transactional_id}: aborted ({error.name()}: {error.str()})"
    if error.code() in _UNFIT:
        return RefusedError(f"{said}; one of its records can never be written")
    if error.code() in _REFUSED:
        return BrokerError(f"{said}; sending it again would not help")
    return AbortedError(said)


def unappended(error: Any) -> StreamsError:  # noqa: ANN401
    """Return the error for a record outside of transactions that was not acknowledged."""
    said = f"a record was not acknowledged ({error.name()}: {error.str()})"
    if error.code() in _UNFIT | _REFUSED:
        return RefusedError(f"{said}; it can never be written")
    return OutcomeUnknownError(
        f"{said}; it may be in the log: restart this process, which reads it"
    )


def until(
    deadline: float,
    call: Callable[[], T],
    doing: str,
    bootstrap: str,
    passing: Set[int] = NOISE,
) -> T:
    """Return `call()`; repeat it after `passing` errors until `deadline` (monotonic).

    Raises:
        BrokerError: another error, or the deadline.
    """
    while True:
        try:
            return call()
        except KafkaException as err:
            error = error_of(err)
            if error.code() not in passing or time.monotonic() >= deadline:
                raise broker_error(error, doing, bootstrap) from err
        except TimeoutError as err:  # a future's: this process slept, and its client with it
            if time.monotonic() >= deadline:
                raise BrokerError(f"Kafka at {bootstrap}: {doing}: no answer in time") from err
        time.sleep(0.05)


def is_silence(error: BrokerError) -> bool:
    """Whether nothing answered as a broker, which a client cannot distinguish from a pause."""
    cause = error.__cause__
    silent = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE)
    return isinstance(cause, KafkaException) and error_of(cause).code() in silent


class Login:
    """Memory of a login that the broker refused: no other request would fare better.

    The client reports it beside its calls, which time out as if no broker were there.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._refused = ""

    def seen(self, error: Any) -> None:  # noqa: ANN401
        """Note an error that the client reported."""
        if error.code() == KafkaError._AUTHENTICATION:
            self._refused = error.str()

    def check(self) -> None:
        """
        Raises:
            BrokerError: the broker refuses our login.
        """
        if self._refused:
            raise BrokerError(
                f"Kafka at {self._bootstrap} refuses our login: {self._refused}; the password is "
                "not the broker's: correct broker.options, or, of an embedded broker, put "
                "broker/password in the run's folder back as it was when the broker was started"
            )


class Outage:
    """Time since which the broker has not answered; silence of a broker that is up is no outage."""

    def __init__(self, bootstrap: str, outage_s: float) -> None:
        self._bootstrap = bootstrap
        self._outage_s = outage_s
        self._since: float | None = None
        self._login = Login(bootstrap)

    def seen(self, error: Any) -> None:  # noqa: ANN401
        """Note an error that the client reported beside the stream."""
        self._login.seen(error)
        if self._since is None and error.code() in NOISE:
            self._since = time.monotonic()

    def over(self) -> None:
        """Note that the broker answered."""
        self._since = None

    def check(self, probe: Callable[[], object]) -> None:
        """Probe the broker once the outage lasts too long.

        Raises:
            BrokerError: the broker has been silent for `outage_s` and still is; or it refuses our
                login.
        """
        self._login.check()
        if self._since is None or time.monotonic() - self._since < self._outage_s:
            return
        try:
            probe()
        except KafkaException as err:
            silent_s = time.monotonic() - self._since
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
            raise BrokerError(
                f"Kafka at {self._bootstrap} has been unreachable since {since} "
                f"({silent_s:.0f} s, limit {self._outage_s:.0f} s): {error_of(err).str()}"
            ) from err
        self.over()
