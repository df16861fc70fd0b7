"""The interfaces between roles and the log. `KafkaBus` and `MemoryBus` give the same guarantees.

Everything is synchronous and belongs to the thread that created it. A role's loop is its I/O
thread; compute (an engine, a forward pass, an optimizer step) runs in other threads.
Topics, groups and transactional ids are named without the run's prefix; the bus adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rlstreams.schemas import SchemaTexts
from rlstreams.streams.log.errors import TopicMismatchError
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.topics import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    """Records and partition changes that one poll returned.

    Handle `revoked`, then `assigned`, then `records`.
    """

    records: Sequence[RawRecord] = ()
    # Newly assigned, with the group's position by its last stable (no longer pending) commit.
    assigned: Mapping[Partition, Committed] = field(default_factory=dict)
    # No longer assigned: forget their unfinished and their finished but uncommitted records.
    revoked: frozenset[Partition] = frozenset()


class Closing(Protocol):
    """Closed at the end of a `with` block; a subclass defines `close` alone."""

    def close(self) -> None:
        """Release connections; idempotent."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class GroupConsumer(Closing, Protocol):
    """Reads committed records of topics whose partitions a group shares out among its members.

    An assigned partition starts at its committed offset, or at its beginning. The first poll joins
    the group.
    """

    def poll(self, max_records: int, timeout_s: float, *, max_bytes: int | None = None) -> Polled:
        """Return whole records, at most `max_records`; return early with those that are there.

        A partition's records come in order. With `max_records` 0 it only keeps the membership.
        No more are fetched once their values hold `max_bytes`; fetched records are delivered.
        """

    def positions(self) -> Mapping[Partition, int]:
        """Return, for each assigned partition, the offset up to which everything was delivered.

        Offsets of markers and aborted records below it count as delivered. The offsets of parts
        whose record is not whole yet do not: the position stays at the first of them.
        """

    def pause(self, partitions: frozenset[Partition]) -> None:
        """Deliver nothing from exactly these until called again; keeps the membership."""

    def leave(self) -> Set[Partition]:
        """Leave the group: its other members get our partitions at once. The next poll joins anew.

        Returns:
            What was ours; `before_revoked` is called with it first.
        """

    def when_beyond(self, call: Callable[[Partition, int], Committed]) -> None:
        """Register `call`, which returns the start of a partition whose committed position, its
        argument, lies behind the log's end. Without it such a position is an error of a poll."""

    def before_revoked(self, call: Callable[[Set[Partition]], None]) -> None:
        """Register `call`, which gets partitions that will go to another member while still ours.

        It may commit their positions: no member gets them before it returns. A poll calls it before
        `Polled.revoked` names them, and only with partitions that earlier polls reported as
        assigned. It is not called for partitions that are lost (the group dropped this member) or
        left by `close`. The poll passes on its exceptions.
        """


class Reader(Closing, Protocol):
    """Reads committed records of given partitions from given offsets; no group, no commits."""

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """Return whole records, at most `max_records`; return early with those that are there.

        Raises:
            OffsetGoneError: the offset is outside the log; names the range that is there.
            RuntimeError: it is closed.
        """

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets on."""

    def positions(self) -> Mapping[Partition, int]:
        """Return the next offset to deliver by partition; it skips markers and aborted records."""


class Commit(Protocol):
    """A transaction that was started; it ends by itself, before its deadline."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; returns whether the transaction has ended.

        Raises:
            OutcomeUnknownError: it is past its deadline; exit.
        """

    def result(self) -> None:
        """Raise what `Producer.commit` would raise. Call it only after `wait` returned True."""


class Producer(Closing, Protocol):
    """Writes under one transactional id. Making one fences its predecessor of the same id."""

    def commit(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Sequence[Position]:
        """Write one whole transaction: all records and all positions, or nothing.

        Returns:
            The position of each record's part 0, in order.

        Raises:
            AbortedError: nothing happened; handle revocations (poll), then send again.
            RefusedError: nothing happened, and one of these records can never be written. The next
                commit may be aborted, for the client skips the sequence numbers of refused records.
            FencedError: final for this process.
            OutcomeUnknownError: no answer before the deadline; exit.
        """

    def start(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Commit:
        """`commit`, without waiting for its end: most of it is waiting for the broker.

        It returns no positions, and so takes less time for each record than `commit`. Until it has
        ended, use neither this producer nor `consumer`: a poll could take part in a rebalance that
        the transaction knows nothing of.

        Raises:
            AbortedError: positions of partitions that are not ours; nothing was started.
            FencedError, OutcomeUnknownError: the end of an earlier commit.
        """


class Appender(Closing, Protocol):
    """Writes single records outside of transactions: a record that was acknowledged is in the log.

    Nothing fences it: readers decide by the log's own order which of its records count. Any thread
    may append. Records of one partition come in the order in which they were appended.
    """

    def append(self, record: Outgoing) -> Future[Position]:
        """Write a record once; the future ends with its place when every in-sync replica has it.

        The future ends with
            RefusedError: the record is not in the log and never will be.
            OutcomeUnknownError: the record may be in the log or not, as may those appended with it;
                exit, the next start reads the log.

        Raises:
            ValueError: it takes several parts, and a death would leave only some of them.
        """


class Bus(Closing, Protocol):
    """Makes producers, consumers and readers of one run, and answers questions about its topics."""

    def producer(self, transactional_id: str) -> Producer:
        """Make a producer; wait until its predecessor's transaction is settled."""

    def appender(self) -> Appender:
        """Make an appender."""

    def consumer(self, group: str, topics: Sequence[str]) -> GroupConsumer:
        """Make a member of `group`."""

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> Reader:
        """Make a reader, at `offsets` if given."""

    def partitions(self, topic: str) -> int:
        """Return the number of partitions.

        Raises:
            TopicMismatchError: no such topic.
        """

    def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        """Return the id of each topic; a re-created topic has another id."""

    def settings(self, topic: str) -> Mapping[str, str]:
        """Return the topic's configuration in Kafka's words, e.g. `retention.ms`.

        Raises:
            TopicMismatchError: no such topic.
        """

    def cluster_id(self) -> str:
        """Return the id of the cluster."""

    def schemas(self) -> SchemaTexts:
        """Return schema texts from the topic `schemas`, for records of other releases.

        Pass them to every `decoded`. Nothing is read before a text is needed.
        """

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        """Return the first offset that each partition still has."""

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """Return the last stable offset of each partition: a reader there has read all of now.

        Records committed a moment ago may lie beyond it: the broker writes a transaction's markers
        after it has answered the commit.
        """

    def written_since(self, partition: Partition, at_ms: int) -> tuple[int, int]:
        """Return the first offset written at or after a time, by its writer's clock, and the end.

        That end may lie beyond the last stable offset: a reader that reaches it has seen the end of
        every transaction of now, also of a writer that is gone.
        """

    def committed(self, group: str, topic: str) -> Mapping[Partition, Committed]:
        """Return the group's positions, after pending transactions on them are settled.

        Partitions without a commit are left out.

        Raises:
            NoGroupsError: the log is a recording.
        """


def existing(bus: Bus, topics: Iterable[Topic]) -> tuple[Topic, ...]:
    """Return the topics without later ones (`is_later`) that a run of an older release lacks.

    A missing topic that is not later stays in: its first use raises the error that names it.
    """
    return tuple(topic for topic in topics if not topic.is_later or _is_there(bus, topic))


def present(bus: Bus, topics: Iterable[Topic]) -> tuple[Topic, ...]:
    """Return the topics that the log has: a recording may lack any."""
    return tuple(topic for topic in topics if _is_there(bus, topic))


def _is_there(bus: Bus, topic: Topic) -> bool:
    try:
        return bus.partitions(topic.name) > 0
    except TopicMismatchError:
        return False
