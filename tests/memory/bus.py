"""`MemoryBus`: the interfaces without a broker, for tests; same guarantees as `KafkaBus`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from rlstreams.streams.log.bus import Closing, GroupConsumer
from rlstreams.streams.log.catalogue import Catalogue
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import (
    AbortedError,
    BrokerError,
    DeadlineError,
    FencedError,
    OutcomeUnknownError,
    StreamsError,
    TopicMismatchError,
)
from rlstreams.streams.log.parts import PART_BYTES, Message, num_parts, part_headers, split, whole
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position
from rlstreams.streams.run.partitioner import partition_of
from tests.memory.consumer import MemoryGroupConsumer, MemoryReader
from tests.memory.log import MemoryLog, State, Transaction, named

STABLE_S = 35.0  # how long `committed` waits for a pending transaction
_METADATA_CHARACTERS = 4095  # what Kafka accepts through confluent-kafka


class Ended:
    """The port `Commit`: it has ended when it is handed out."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._error: StreamsError | None = None
        try:
            end()
        except StreamsError as err:
            self._error = err

    def wait(self, timeout_s: float) -> bool:
        """At once."""
        return True

    def result(self) -> None:
        """See `Commit`."""
        if self._error is not None:
            raise self._error


class MemoryProducer(Closing):
    """The port `Producer`."""

    def __init__(self, log: MemoryLog, run: str, transactional_id: str, part_bytes: int) -> None:
        self._log = log
        self._run = run
        self._id = transactional_id
        self._part_bytes = part_bytes
        self._epoch = log.initialise(transactional_id)
        self._sent = 0
        self._ended: StreamsError | None = None

    def commit(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Sequence[Position]:
        """See `Producer`."""
        if self._ended is not None:
            raise self._ended
        if not records and not consumed:
            return []
        member = _member(consumed or {}, consumer)
        try:
            reach(CrashPoint.BEGIN_BEFORE)
            transaction = self._log.begin(self._id, self._epoch)
            return self._transaction(transaction, records, consumed or {}, member)
        except (FencedError, OutcomeUnknownError) as err:
            self._ended = err
            raise

    def start(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: GroupConsumer | None = None,
    ) -> Ended:
        """See `Producer`; it has ended when this returns."""
        return Ended(lambda: self.commit(records, consumed, consumer))

    def _transaction(
        self,
        transaction: Transaction,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed],
        member: MemoryGroupConsumer | None,
    ) -> Sequence[Position]:
        """What a crash point raises leaves the transaction open, as a killed process does."""
        reach(CrashPoint.BEGIN_AFTER)
        try:
            positions = [self._append(transaction, record) for record in records]
            reach(CrashPoint.SEND_AFTER)
            if member is not None:
                reach(CrashPoint.OFFSETS_BEFORE)
                self._add_offsets(transaction, consumed, member)
                reach(CrashPoint.OFFSETS_AFTER)
        except StreamsError:
            self._log.end(transaction, State.ABORTED)
            raise
        reach(CrashPoint.COMMIT_BEFORE)
        self._log.end(transaction, State.COMMITTED)
        reach(CrashPoint.COMMIT_AFTER)
        return positions

    def _add_offsets(
        self,
        transaction: Transaction,
        consumed: Mapping[Partition, Committed],
        member: MemoryGroupConsumer,
    ) -> None:
        _check_metadata(consumed)
        offsets = {named(self._run, p): at for p, at in consumed.items()}
        with self._log.changed:
            member.check_alive()
            self._log.add_offsets(transaction, member.group, offsets)

    def _append(self, transaction: Transaction, record: Outgoing) -> Position:
        partition = _place(self._log, self._run, record)
        self._sent += 1
        count = num_parts(len(record), self._part_bytes)
        record_id = f"{self._id}.{self._epoch}.{self._sent}"
        offsets = []
        for index, part in enumerate(split(record.value, self._part_bytes)):
            headers = dict(part_headers(record.headers, record_id, index, count))
            message = _message(partition, record)._replace(value=part, headers=headers)
            offsets.append(self._log.append(transaction, message))
        return Position(record.topic, partition.number, offsets[0])

    def close(self) -> None:
        """Nothing to release."""


class MemoryAppender(Closing):
    """The port `Appender`; a record is acknowledged when `append` returns."""

    def __init__(self, log: MemoryLog, run: str) -> None:
        self._log = log
        self._run = run

    def append(self, record: Outgoing) -> Future[Position]:
        """See `Appender`."""
        if len(record) > PART_BYTES:
            raise ValueError(f"a record of {len(record)} bytes takes several parts")
        answer: Future[Position] = Future()
        try:
            partition = _place(self._log, self._run, record)
            offset = self._log.write(_message(partition, record))
        except StreamsError as err:
            answer.set_exception(err)
        else:
            answer.set_result(Position(record.topic, partition.number, offset))
        return answer

    def close(self) -> None:
        """Nothing to release."""


def _place(log: MemoryLog, run: str, record: Outgoing) -> Partition:
    topic = f"{run}.{record.topic}"
    try:
        total = len(log.topic(topic).logs)
    except TopicMismatchError as err:
        raise BrokerError(f"{err}; sending it again would not help") from err
    number = partition_of(record.key, total) if record.partition is None else record.partition
    if not 0 <= number < total:
        raise BrokerError(
            f"topic {topic} has {total} partitions, a record is for {number}; "
            "sending it again would not help"
        )
    return Partition(topic, number)


def _message(partition: Partition, record: Outgoing) -> Message:
    return Message(
        partition=partition,
        offset=-1,
        key=record.key,
        value=whole(record.value),
        headers=dict(record.headers),
        timestamp_ms=time.time_ns() // 1_000_000,
    )


def _member(
    consumed: Mapping[Partition, Committed], consumer: GroupConsumer | None
) -> MemoryGroupConsumer | None:
    if not consumed:
        return None
    if not isinstance(consumer, MemoryGroupConsumer):
        raise TypeError(f"positions need the MemoryGroupConsumer they belong to, got {consumer!r}")
    foreign = sorted(str(partition) for partition in consumed if not consumer.owns(partition))
    if foreign:
        raise AbortedError(f"positions of partitions that are not ours: {', '.join(foreign)}")
    return consumer


def _check_metadata(consumed: Mapping[Partition, Committed]) -> None:
    for partition, at in consumed.items():
        if len(at.metadata) > _METADATA_CHARACTERS:
            raise BrokerError(
                f"{partition}: commit metadata of {len(at.metadata)} characters, "
                f"{_METADATA_CHARACTERS} are allowed; sending it again would not help"
            )


class MemoryBus(Closing):
    """The port `Bus` on a `MemoryLog`, which several handles share.

    Args:
        log: the cluster.
        run: prefix of topics, groups and transactional ids.
        part_bytes: largest part of a record.
    """

    def __init__(self, log: MemoryLog, run: str, *, part_bytes: int = PART_BYTES) -> None:
        self._log = log
        self._run = run
        self._part_bytes = part_bytes
        self._catalogue = Catalogue(self)

    def _name(self, name: str) -> str:
        return f"{self._run}.{name}"

    def producer(self, transactional_id: str) -> MemoryProducer:
        """A producer; its predecessor's transaction is aborted."""
        return MemoryProducer(self._log, self._run, self._name(transactional_id), self._part_bytes)

    def appender(self) -> MemoryAppender:
        """See `Bus`."""
        return MemoryAppender(self._log, self._run)

    def consumer(self, group: str, topics: Sequence[str]) -> MemoryGroupConsumer:
        """See `Bus`."""
        partitions = [p for topic in topics for p in self._partitions(topic)]
        return MemoryGroupConsumer(self._log, self._run, self._name(group), partitions)

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> MemoryReader:
        """See `Bus`."""
        return MemoryReader(self._log, self._run, offsets)

    def partitions(self, topic: str) -> int:
        """See `Bus`."""
        return len(self._log.topic(self._name(topic)).logs)

    def _partitions(self, topic: str) -> list[Partition]:
        return [Partition(topic, number) for number in range(self.partitions(topic))]

    def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        """See `Bus`."""
        return {topic: self._log.topic(self._name(topic)).topic_id for topic in topics}

    def settings(self, topic: str) -> Mapping[str, str]:
        """What `MemoryLog.configure` set."""
        return dict(self._log.topic(self._name(topic)).settings)

    def cluster_id(self) -> str:
        """The id of the log."""
        return self._log.cluster_id

    def schemas(self) -> Catalogue:
        """See `Bus`."""
        return self._catalogue

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        """See `Bus`."""
        return {p: self._range(p)[0] for p in self._partitions(topic)}

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """See `Bus`."""
        return {p: self._range(p)[1] for p in self._partitions(topic)}

    def written_since(self, partition: Partition, at_ms: int) -> tuple[int, int]:
        """See `Bus`."""
        return self._log.written_since(named(self._run, partition), at_ms)

    def _range(self, partition: Partition) -> tuple[int, int]:
        return self._log.range(named(self._run, partition))

    def committed(self, group: str, topic: str) -> Mapping[Partition, Committed]:
        """See `Bus`.

        Raises:
            DeadlineError: a transaction stayed open.
        """
        name = self._name(group)
        ours = {p: named(self._run, p) for p in self._partitions(topic)}
        settled = self._log.wait_until(
            lambda: all(self._log.is_stable(name, theirs) for theirs in ours.values()),
            time.monotonic() + STABLE_S,
        )
        if not settled:
            raise DeadlineError(
                f"offsets of group {name} in {topic}: a transaction on them is still open "
                f"after {STABLE_S:g} s"
            )
        with self._log.changed:
            found = self._log.group(name).committed
            return {p: found[theirs] for p, theirs in ours.items() if theirs in found}

    def close(self) -> None:
        """Nothing to release."""
