"""The two ends of the data path, ours and the bare client's, under the same settings.

Ours: events through the codec, the commits of a role's loop and `KafkaBus`, with the positions of a
group member and its done set in every transaction; the next one is encoded while one is under way,
as in the loop of a role. Without transactions: the same records through the client alone; it looks
at each one's delivery report, as whoever must not lose one does. Bare: the same confluent-kafka
client with ready bytes, no headers and no delivery reports, `np.frombuffer` at the other end; what
is above its maximum size goes in parts that the reader joins. Its bytes are made before the clock
starts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from confluent_kafka import Consumer, Producer, TopicPartition

from rlstreams.schemas import Trajectory
from rlstreams.streams.kafka.bus import _CONSUMER, _PRODUCER, KafkaBus
from rlstreams.streams.log.bus import GroupConsumer, Polled
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.parts import PART_BYTES, num_parts, part_headers, split
from rlstreams.streams.log.record import Committed, Partition, RawRecord
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.streams.log.tracker import Tracker
from rlstreams.workers.loop.pending import Finished, PendingCommits
from rlstreams.workers.loop.runtime import IDLE_S
from tests.bench.codec import payload

RUN = "bench"
INPUT = "inputs"  # the small topic whose positions are committed
IN_WORK = 256  # inputs that the stand-in of an engine works on at once; they finish in any order
MAX_POLL = 64
ANSWER_S = 30.0

Arrays = tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What one message holds, and how it is offered."""

    name: str
    shape: tuple[int, ...]  # tokens, and with routed experts layers and top-k
    pool: int  # different samples that take turns
    per_transaction: int  # at first; what is sent in about 100 ms on two cores


PAYLOADS = {
    p.name: p
    for p in (
        Payload(name="S", shape=(1024,), pool=256, per_transaction=2560),
        Payload(name="M", shape=(16384,), pool=64, per_transaction=224),
        Payload(name="L", shape=(8192, 48, 8), pool=8, per_transaction=14),
    )
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One message of the pool in both forms."""

    event: Trajectory
    key: bytes
    parts: tuple[bytes, ...]  # its arrays end to end
    num_bytes: int

    def arrays(self) -> Arrays:
        return arrays_of(self.event)


@cache
def pool(name: str) -> tuple[Sample, ...]:
    """The same samples in every process."""
    return tuple(_sample(8 * number, PAYLOADS[name]) for number in range(PAYLOADS[name].pool))


def _sample(number: int, kind: Payload) -> Sample:
    event, num_bytes = payload(number, *kind.shape)
    whole = b"".join(array.tobytes() for array in arrays_of(event))
    assert len(whole) == num_bytes
    parts = tuple(whole[i : i + PART_BYTES] for i in range(0, num_bytes, PART_BYTES))
    return Sample(event, event.group_id.encode(), parts, num_bytes)


def arrays_of(event: Trajectory) -> Arrays:
    """What a trainer would take: ids and log-probs of the policy's segment, experts if any."""
    segment = event.segments[-1]
    found = (segment.token_ids.numpy(), segment.behavior_logprobs.numpy())
    return found if event.routed_experts is None else (*found, event.routed_experts.numpy())


def arrays_in(value: bytes, shape: tuple[int, ...]) -> Arrays:
    """The same from the bare client's bytes."""
    num_tokens = shape[0]
    ids = np.frombuffer(value, np.int32, num_tokens)
    logprobs = np.frombuffer(value, np.float32, num_tokens, ids.nbytes)
    if len(shape) == 1:
        return ids, logprobs
    return ids, logprobs, np.frombuffer(value, np.uint8, offset=2 * ids.nbytes).reshape(shape)


class Sender(Protocol):
    """Sends samples of a pool."""

    def send(self, topic: str, samples: Sequence[Sample]) -> None:
        """One transaction."""

    def finish(self) -> None:
        """Wait until all is acknowledged."""


class Receiver(Protocol):
    """Reads committed samples."""

    def seek(self, topic: str, num_partitions: int) -> None:
        """Begin at the beginning."""

    def take(self, shape: tuple[int, ...]) -> Sequence[Arrays]:
        """What has come, as arrays; waits a little for the first."""


class Work:
    """Inputs of a group member that are begun, and finish in another order.

    The records were read once; when all are finished they are begun anew, with a tracker that
    knows of no commit: what is measured is the bookkeeping and the commit of every interval.
    """

    def __init__(self, consumer: GroupConsumer) -> None:
        self._records, self._assigned = _read_all(consumer)
        self._late = False
        self.restart()

    def restart(self) -> None:
        """Begin the next lap."""
        self.tracker = Tracker()
        self.tracker.take(Polled(assigned=self._assigned), {})
        self._left: Iterator[RawRecord] = iter(self._records)
        self._open: list[RawRecord] = []
        self._at: dict[Partition, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether the lap's inputs are all finished."""
        self._begin(1)
        return not self._open

    def _begin(self, count: int) -> None:
        while len(self._open) < IN_WORK + count:
            new = [record for record, _ in zip(self._left, range(IN_WORK), strict=False)]
            if not new:
                break
            self._at |= {record.partition: record.position.offset + 1 for record in new}
            self._open += self.tracker.take(Polled(records=new), self._at)

    def finished(self, count: int) -> Sequence[RawRecord]:
        """`count` inputs, fewer at the end of a lap."""
        self._begin(count)
        # Every other time the oldest go on: the done set is long, then the watermark moves.
        self._late = not self._late
        start = min(IN_WORK // 2, len(self._open) // 2) if self._late else 0
        done = self._open[start : start + count]
        del self._open[start : start + count]
        return done


def _read_all(consumer: GroupConsumer) -> tuple[list[RawRecord], dict[Partition, Committed]]:
    """Everything in the input topic, partitions in turns as an idle broker sends it."""
    records: list[RawRecord] = []
    assigned: dict[Partition, Committed] = {}
    quiet = 0
    while quiet < 3:
        polled = consumer.poll(MAX_POLL, 1.0)
        assigned |= polled.assigned
        records += polled.records
        quiet = 0 if polled.records or not records else quiet + 1
    return sorted(records, key=lambda r: r.position.offset), assigned


class OurSender:
    """Encoding and commit as the loop of a role has them."""

    def __init__(self, bootstrap: str) -> None:
        bus = KafkaBus(bootstrap, RUN)
        self._producer = bus.producer("ours")
        self._consumer = bus.consumer("ours", [INPUT])
        self._work = Work(self._consumer)
        self._pending = self._new_pending()

    def _new_pending(self) -> PendingCommits:
        return PendingCommits(self._producer, self._consumer, self._work.tracker, _never)

    def send(self, topic: str, samples: Sequence[Sample]) -> None:
        target = replace(TRAJECTORIES, name=topic)
        if self._work.is_over:  # a new lap, with a tracker that knows of no commit
            self.finish()
            self._work.restart()
            self._pending = self._new_pending()
        outputs = [outgoing(target, sample.event) for sample in samples]
        raws = self._work.finished(len(outputs))
        last = len(raws) - 1  # at the end of a lap it carries what is left
        ranges = [slice(n, n + 1 if n < last else None) for n in range(len(raws))]
        self._pending.add(
            [
                Finished(raw=raw, outputs=tuple(outputs[which]))
                for raw, which in zip(raws, ranges, strict=True)
            ]
        )
        self._settle()
        self._consumer.poll(0, 0)
        self._pending.start()

    def _settle(self) -> None:
        """Wait for the end of what is under way; what was added since stays."""
        deadline_s = time.monotonic() + ANSWER_S
        while not self._pending.settle(IDLE_S):
            assert time.monotonic() < deadline_s, "no answer to a commit"

    def finish(self) -> None:
        """Wait for the transaction that is under way; an aborted one is sent again, as roles do."""
        deadline_s = time.monotonic() + ANSWER_S
        while not (self._pending.settle(IDLE_S) and not self._pending.has_ready):
            assert time.monotonic() < deadline_s, "nothing but aborts"
            if not self._pending.is_under_way:
                self._consumer.poll(0, IDLE_S)
                self._pending.start()


def _never(raw: RawRecord, why: str) -> Finished:
    raise AssertionError(f"{raw.position} cannot be written: {why}")


def _servers(bootstrap: str) -> dict[str, str]:
    return {"bootstrap.servers": bootstrap, "log_level": "2"}


class BareSender:
    """The client alone, in transactions with the same positions."""

    def __init__(self, bootstrap: str) -> None:
        servers = _servers(bootstrap)
        self._producer = Producer(servers | _PRODUCER | {"transactional.id": f"{RUN}.bare"})
        self._producer.init_transactions(ANSWER_S)
        group = {"group.id": f"{RUN}.bare", "group.protocol": "consumer"}
        self._consumer = Consumer(servers | _CONSUMER | group | {"auto.offset.reset": "latest"})
        self._consumer.subscribe([f"{RUN}.{INPUT}"])
        while not self._consumer.assignment():
            self._consumer.poll(0.1)
        metadata = "b" + 40 * "x"  # as long as a done set of a worker's window
        self._offsets = [
            TopicPartition(tp.topic, tp.partition, 0, metadata)
            for tp in self._consumer.assignment()
        ]

    def send(self, topic: str, samples: Sequence[Sample]) -> None:
        produce, name = self._producer.produce, f"{RUN}.{topic}"
        self._producer.begin_transaction()
        member = self._consumer.consumer_group_metadata()
        for sample in samples:
            for part in sample.parts:
                produce(name, part, sample.key)
        self._producer.send_offsets_to_transaction(self._offsets, member, ANSWER_S)
        self._producer.commit_transaction(ANSWER_S)
        self._consumer.poll(0)

    def finish(self) -> None:
        """A commit has already waited."""


class IdempotentSender:
    """Our records through the client alone: acknowledged, without transactions and positions."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(_servers(bootstrap) | _PRODUCER)

    def _reported(self, error: Any, message: Any) -> None:
        assert error is None, error
        assert message.offset() is not None, "acknowledged, but maybe not in the log"

    def send(self, topic: str, samples: Sequence[Sample]) -> None:
        target = replace(TRAJECTORIES, name=topic)
        for sample in samples:
            record = outgoing(target, sample.event)
            count, name = num_parts(len(record)), f"{RUN}.{topic}"
            for index, part in enumerate(split(record.value)):
                self._produce(
                    name,
                    part,
                    record.key,
                    part_headers(record.headers, str(id(sample)), index, count),
                )
        self._producer.poll(0)

    def _produce(self, name: str, part: bytes, key: bytes, headers: Any) -> None:
        while True:
            try:
                self._producer.produce(name, part, key, headers=headers, on_delivery=self._reported)
            except BufferError:
                self._producer.poll(0.005)
            else:
                return

    def finish(self) -> None:
        left = self._producer.flush(ANSWER_S)
        assert left == 0, f"{left} messages are not acknowledged after {ANSWER_S:.0f} s"


class OurReceiver:
    """`Reader.poll` and `decoded`, as the trainer reads."""

    def __init__(self, bootstrap: str) -> None:
        self._reader = KafkaBus(bootstrap, RUN).reader()

    def seek(self, topic: str, num_partitions: int) -> None:
        self._reader.seek({Partition(topic, number): 0 for number in range(num_partitions)})

    def take(self, shape: tuple[int, ...]) -> Sequence[Arrays]:
        found = []
        for raw in self._reader.poll(MAX_POLL, 0.2):
            event = decoded(raw).event
            assert isinstance(event, Trajectory)
            found.append(arrays_of(event))
        return found


class BareReceiver:
    """`poll`, `consume` and `np.frombuffer`."""

    def __init__(self, bootstrap: str) -> None:
        group = {"group.id": f"{RUN}.bare-reader"}
        self._consumer = Consumer(_servers(bootstrap) | _CONSUMER | group)
        self._parts: dict[int, list[bytes]] = defaultdict(list)

    def seek(self, topic: str, num_partitions: int) -> None:
        self._consumer.assign(
            [TopicPartition(f"{RUN}.{topic}", number, 0) for number in range(num_partitions)]
        )

    def take(self, shape: tuple[int, ...]) -> Sequence[Arrays]:
        first = self._consumer.poll(0.2)
        if first is None:
            return []
        messages = [first, *self._consumer.consume(MAX_POLL - 1, 0)]
        for message in messages:
            assert message.error() is None, message.error()
        if len(shape) == 1:
            return [arrays_in(message.value(), shape) for message in messages]
        return [arrays_in(value, shape) for m in messages if (value := self._whole(m, shape))]

    def _whole(self, message: Any, shape: tuple[int, ...]) -> bytes:
        """One sender's parts are neighbours in their partition; empty until they are all there."""
        num_bytes = 8 * shape[0] + int(np.prod(shape))
        parts = self._parts[message.partition()]
        parts.append(message.value())
        if len(parts) < -(-num_bytes // PART_BYTES):
            return b""
        whole = b"".join(parts)
        parts.clear()
        return whole
