"""Converts messages of one confluent consumer to our records: names, errors, parts and positions.

The group consumer gets its partitions from the group, the reader from its caller; both read by a
`KafkaFeed`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from rlstreams.streams.kafka.errors import (
    IGNORED,
    NO_TOPIC,
    NOISE,
    NOT_YET_KNOWN,
    OFFSET_GONE,
    Outage,
    broker_error,
    error_of,
)
from rlstreams.streams.log.errors import OffsetGoneError, StreamsError, TopicMismatchError
from rlstreams.streams.log.parts import Assembler, Message, RecordKey
from rlstreams.streams.log.record import Partition, RawRecord

ASK_S = 10.0  # longest wait for one answer of the broker
SOON_S = 1.0  # the same for a request that is repeated anyhow: polls wait for it
SLICE_S = 0.2  # the client doesn't see signals while it waits
# Time for which a record may be incomplete before we ask whether it can become whole. The answer is
# right at any time; the pause only saves the request where the rest is on its way.
TORN_S = 0.1


class KafkaFeed:
    """The messages that `consumer` reads, as records of the run `run`."""

    def __init__(self, consumer: Any, run: str, bootstrap: str, outage: Outage) -> None:  # noqa: ANN401
        self.consumer = consumer
        self.assembler = Assembler()
        self.bootstrap = bootstrap
        self._prefix = f"{run}."
        self._outage = outage
        # By incomplete record: first seen at, and the end of the log that must bring the rest.
        self._waiting: dict[RecordKey, tuple[float, int | None]] = {}

    def ours(self, tp: Any) -> Partition:  # noqa: ANN401
        """Return the client's partition, without the run's prefix."""
        return Partition(tp.topic.removeprefix(self._prefix), tp.partition)

    def theirs(self, partition: Partition, offset: int | None = None) -> Any:  # noqa: ANN401
        """Return the partition as the client names it."""
        topic = self._prefix + partition.topic
        if offset is None:
            return TopicPartition(topic, partition.number)
        return TopicPartition(topic, partition.number, offset)

    def fetch(self, limit: int, timeout_s: float) -> tuple[list[Message], StreamsError | None]:
        """Return at most `limit` messages: wait for the first, take others that are there.

        An error comes with the messages that were read before it, which would otherwise be lost:
        they are out of the client's queue.
        """
        first = self.consumer.poll(max(0.0, min(timeout_s, SLICE_S)))
        if first is None:
            self._outage.check(lambda: self.consumer.list_topics(timeout=ASK_S))
            return [], None
        raw = [first]
        if limit > 1:
            raw += self.consumer.consume(limit - 1, 0)
        found: list[Message] = []
        for message in raw:
            if message.error() is None:
                self._outage.over()
                found.append(self._message(message))
            elif (error := self._meaning(message)) is not None:
                return found, error
        return found, None

    def _message(self, message: Any) -> Message:  # noqa: ANN401
        return Message(
            Partition(message.topic().removeprefix(self._prefix), message.partition()),
            message.offset(),
            message.key() or b"",
            message.value() or b"",
            dict(message.headers() or ()),
            message.timestamp()[1],
        )

    def _meaning(self, message: Any) -> StreamsError | None:  # noqa: ANN401
        """Return the error of an event; None: it passes by itself, or is reported otherwise."""
        error = message.error()
        code = error.code()
        if code in IGNORED:
            return None
        if code in OFFSET_GONE:
            partition = Partition(message.topic().removeprefix(self._prefix), message.partition())
            return self.gone(partition, message.offset())
        if code in NOISE:
            self._outage.seen(error)
            return None
        if code in NO_TOPIC:
            return TopicMismatchError(
                f"topic {message.topic()} does not exist at {self.bootstrap} (any more)"
            )
        return broker_error(error, f"reading {message.topic() or 'its topics'}", self.bootstrap)

    def gone(self, partition: Partition, offset: int) -> OffsetGoneError:
        """Return the error that names the requested offset and the range that is there."""
        now = self._range_now(partition)
        there = f"has {now[0]} to {now[1]}" if now else "does not have it, nor say what it has"
        return OffsetGoneError(
            f"{partition}: offset {offset} was asked for, the topic {there}; "
            "retention removed it, or the topic was created anew"
        )

    def range(self, partition: Partition, timeout_s: float = ASK_S) -> tuple[int, int]:
        """Return first offset and last stable offset. Never cached: that is the high watermark.

        Raises:
            KafkaException: no answer; errors of `NOT_YET_KNOWN` pass by themselves.
        """
        low, high = self.consumer.get_watermark_offsets(
            self.theirs(partition), timeout=timeout_s, cached=False
        )
        return low, high

    def _range_now(self, partition: Partition) -> tuple[int, int] | None:
        """Return `range`; None while no broker answers. Polls limit how long that may last."""
        try:
            return self.range(partition, SOON_S)
        except KafkaException as err:
            error = error_of(err)
            if error.code() not in NOT_YET_KNOWN:
                doing = f"asking for the offsets of {partition}"
                raise broker_error(error, doing, self.bootstrap) from err
            self._outage.seen(error)
            return None

    def torn(self, position: Mapping[Partition, int]) -> Sequence[RawRecord]:
        """Give up and return incomplete records whose missing parts cannot come any more.

        All parts of a record become visible together, so the missing parts lie below the last
        stable offset, asked for after the parts that we saw. If they were not read up to there,
        they do not exist.
        """
        incomplete = self.assembler.incomplete()
        if not incomplete and not self._waiting:
            return ()
        now_s = time.monotonic()
        waiting = {key: self._waiting.get(key, (now_s, None)) for key in incomplete}
        torn = []
        is_answered = True
        for key, (since_s, bound) in tuple(waiting.items()):
            if bound is None and now_s - since_s > TORN_S:
                now = self._range_now(key.partition) if is_answered else None
                is_answered = now is not None  # or each record would wait for its own answer
                waiting[key] = (since_s, now[1] if now else None)
            elif bound is not None and position.get(key.partition, -1) >= bound:
                del waiting[key]
                torn.append(self.assembler.give_up(key))
        self._waiting = waiting
        return torn

    def reached(self, starts: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the client's next offset by partition; it steps over markers and aborted records.

        Args:
            starts: first offset of each partition: before its first message the client knows none.
        """
        # The client answers in the order of the request.
        found = self.consumer.position([self.theirs(partition) for partition in starts])
        return {
            partition: start if tp.offset < start else tp.offset
            for (partition, start), tp in zip(starts.items(), found, strict=True)
        }

    def read(
        self, starts: Mapping[Partition, int], held: Iterable[Message] = ()
    ) -> dict[Partition, int]:
        """Return the offsets up to which every message but `held` is in a record, whole or not."""
        positions = self.reached(starts)
        for message in held:
            partition = message.partition
            positions[partition] = min(positions[partition], message.offset)
        return positions

    def delivered(
        self, starts: Mapping[Partition, int], held: Iterable[Message] = ()
    ) -> dict[Partition, int]:
        """Return the offsets up to which all was delivered: `read`, less incomplete records."""
        positions = self.read(starts, held)
        for partition in {key.partition for key in self.assembler.incomplete()} & starts.keys():
            first = self.assembler.first_offset(partition)
            if first is not None:
                positions[partition] = min(positions[partition], first)
        return positions
