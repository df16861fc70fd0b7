"""From the client's messages to records: what a fetch brings, without a broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from rlstreams.streams.kafka import bus as bus_module
from rlstreams.streams.kafka.consumer import KafkaGroupConsumer
from rlstreams.streams.kafka.errors import Outage
from rlstreams.streams.kafka.feed import KafkaFeed
from rlstreams.streams.kafka.reader import KafkaReader
from rlstreams.streams.log.errors import BrokerError, OffsetGoneError
from rlstreams.streams.log.parts import part_headers
from rlstreams.streams.log.record import Partition, RawRecord

P0, P1, OTHER = Partition("t", 0), Partition("t", 1), Partition("u", 1)
NOISE = KafkaError._TRANSPORT


class Queue:
    """A client whose queue holds these messages and events."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.at: dict[tuple[str, int], int] = {}  # positions of what it has given out
        self.paused: list[TopicPartition] = []

    def poll(self, _timeout_s: float) -> Message | None:
        return next(iter(self.consume(1, 0)), None)

    def consume(self, limit: int, _timeout_s: float) -> Sequence[Message]:
        taken, self.messages = self.messages[:limit], self.messages[limit:]
        self.at |= {(m.topic(), m.partition()): m.offset() + 1 for m in taken if m.error() is None}
        return taken

    def position(self, tps: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        return [
            TopicPartition(tp.topic, tp.partition, self.at.get((tp.topic, tp.partition), -1001))
            for tp in tps
        ]

    def assign(self, _tps: Sequence[TopicPartition]) -> None:
        self.at = {}

    def get_watermark_offsets(self, _tp: TopicPartition, **_options: Any) -> tuple[int, int]:
        return 4, 7

    def subscribe(self, _topics: list[str], *, on_assign: Callable[..., None], **_: Any) -> None:
        self.given = on_assign

    def committed(self, tps: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(tp.topic, tp.partition, 0) for tp in tps]

    def incremental_assign(self, _tps: Sequence[TopicPartition]) -> None:
        """Nothing."""

    def pause(self, tps: Sequence[TopicPartition]) -> None:
        self.paused += tps

    def resume(self, tps: Sequence[TopicPartition]) -> None:
        self.paused = [tp for tp in self.paused if tp not in tps]


def message(offset: int, at: Partition = P0, headers: dict[str, bytes] | None = None) -> Message:
    """With the offset as its value."""
    return Message(
        topic=f"run.{at.topic}",
        partition=at.number,
        offset=offset,
        key=b"k",
        value=b"%d" % offset,
        headers=list(headers.items()) if headers else None,
        timestamp=(1, 1_000 + offset),
    )


def parts(record_id: str, *offsets: int) -> list[Message]:
    """A record's messages."""
    return [
        message(offset, headers=dict(part_headers({}, record_id, index, len(offsets))))
        for index, offset in enumerate(offsets)
    ]


def event(code: int, offset: int = -1, at: Partition = P0) -> Message:
    """What the client says between messages."""
    topic, error = f"run.{at.topic}", KafkaError(code)
    return Message(topic=topic, partition=at.number, offset=offset, error=error)


def feed_of(client: Any) -> KafkaFeed:
    return KafkaFeed(client, "run", "here:9092", Outage("here:9092", 60.0))


def reader_of(client: Queue, *partitions: Partition) -> KafkaReader:
    return KafkaReader(feed_of(client), dict.fromkeys(partitions, 0))


def values(records: Sequence[RawRecord]) -> list[bytes]:
    return [bytes(record.value) for record in records]


def test_partitions_are_told_apart_by_topic_and_number() -> None:
    """Neighbors with one number in two topics, or with one topic; and none that was not asked."""
    order = [P1, OTHER, P1, P0, P0, OTHER]
    client = Queue(*(message(offset, at) for offset, at in enumerate(order)))
    reader = reader_of(client, P1, P0)
    found = reader.poll(10, 0.0)
    assert [(P1, 0), (P1, 2), (P0, 3), (P0, 4)] == [(r.partition, r[0].offset) for r in found]
    assert {P1: 3, P0: 5} == reader.positions()


def test_an_error_comes_after_the_records_before_it() -> None:
    """They are returned first; then every poll raises, until a seek."""
    gone = event(KafkaError._AUTO_OFFSET_RESET, 2)
    reader = reader_of(client := Queue(message(0), message(1), gone), P0)
    assert [b"0", b"1"] == values(reader.poll(10, 0.0))
    for _ in range(2):
        with pytest.raises(OffsetGoneError, match=r"offset 2 .* 4 to 7"):
            reader.poll(10, 0.0)
    client.messages = [message(4)]
    reader.seek({P0: 4})
    assert [b"4"] == values(reader.poll(10, 0.0))


def test_a_refusal_comes_beside_what_was_fetched_before_it() -> None:
    """For who holds the messages: they are out of the client's queue."""
    refusal = event(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    batches, error = feed_of(Queue(message(0), refusal)).fetch(10, 0.0)
    assert isinstance(error, BrokerError)
    assert [P0] == [batch.partition for batch in batches]


@pytest.mark.parametrize(
    ("brought", "is_out"),
    [
        ([event(NOISE)], True),
        ([event(NOISE), message(0)], False),
        ([message(0), event(NOISE)], True),
        ([message(0), event(NOISE), message(1)], False),
        ([event(NOISE), message(0), event(KafkaError._PARTITION_EOF)], False),
    ],
)
def test_a_message_ends_an_outage(brought: list[Message], is_out: bool) -> None:
    """Also one of the partition that was read before it; not one from before it."""
    feed = feed_of(Queue(*brought))
    feed.fetch(10, 0.0)
    probed: list[float] = []
    feed._outage._outage_s = 0.0
    feed._outage.check(lambda: probed.append(time.monotonic()))
    assert is_out is bool(probed)


def test_events_that_pass_lose_no_message() -> None:
    client = Queue(message(0), event(NOISE), message(1), event(KafkaError._PARTITION_EOF))
    assert [b"0", b"1"] == values(reader_of(client, P0).poll(10, 0.0))


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_parts_and_whole_records_mix(limit: int) -> None:
    """A record comes when its last part does; until then the position stays at its first."""
    first, middle, last = parts("a", 1, 2, 4)
    client = Queue(message(0), first, middle, message(3), last, message(5), *parts("b", 6, 9)[:1])
    reader = reader_of(client, P0)
    found: list[RawRecord] = []
    while client.messages:
        found += reader.poll(limit, 0.0)
        assert len(found) > 2 or reader.positions()[P0] <= 1
    assert [b"0", b"3", b"124", b"5"] == values(found)
    assert [(0,), (3,), (1, 2, 4), (5,)] == [record.offsets for record in found]
    assert {P0: 6} == reader.positions()


def member(client: Queue, *partitions: Partition) -> KafkaGroupConsumer:
    """One that has these partitions, from 0 on."""
    consumer = KafkaGroupConsumer(
        lambda: feed_of(client), ["run.t"], stable_s=1.0, max_poll_s=300.0
    )
    consumer._join()
    client.given(client, [TopicPartition(f"run.{p.topic}", p.number) for p in partitions])
    return consumer


def test_messages_of_a_paused_partition_are_held_one_by_one() -> None:
    """However many came at once, a later poll delivers as many as it is asked for."""
    client = Queue(message(0), message(1), message(0, P1), message(2))
    consumer = member(client, P0, P1)
    consumer.pause(frozenset({P0}))
    assert [P1] == [record.partition for record in consumer.poll(10, 0.0).records]
    assert [("run.t", 0)] == [(tp.topic, tp.partition) for tp in client.paused]
    assert {P0: 0, P1: 1} == consumer.positions()
    consumer.pause(frozenset())
    assert [b"0"] == values(consumer.poll(1, 0.0).records)
    assert {P0: 1, P1: 1} == consumer.positions()
    assert [b"1", b"2"] == values(consumer.poll(2, 0.0).records)
    assert {P0: 3, P1: 1} == consumer.positions()


def test_the_client_tells_positions_in_the_order_of_the_question() -> None:
    """`KafkaFeed.reached` takes them so. What it asked with stays as it was, for the next time."""
    client = Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": "0"})
    try:
        feed = feed_of(client)
        asked = [Partition(name, n) for n in (5, 0, 9) for name in ("u", "a", "t")]
        named = [feed.theirs(partition) for partition in asked]
        client.assign([TopicPartition(tp.topic, tp.partition, 7) for tp in reversed(named)])
        for _ in range(2):
            assert asked == [feed.ours(tp) for tp in client.position(named)]
            assert {-1001} == {tp.offset for tp in named}
        assert {P0: 3} == feed.reached({P0: 3})
    finally:
        client.close()


def test_positions_are_those_of_the_partition() -> None:
    """Whatever the order of the starts; and never before them."""
    client = Queue(message(4, P1), message(7, OTHER))
    feed = feed_of(client)
    feed.fetch(10, 0.0)
    for starts in ({P0: 2, P1: 0, OTHER: 0}, {OTHER: 0, P1: 0, P0: 2}):
        assert {P0: 2, P1: 5, OTHER: 8} == feed.reached(starts)
    assert {P1: 9} == feed.reached({P1: 9})


def test_a_reader_that_seeks_waits_at_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a client's last request at the end of one partition holds up the next for 0.5 s:
    16 partitions took 7 s. Who follows a topic asks as seldom as it may."""
    made: list[dict[str, str]] = []

    def consumer(settings: dict[str, str]) -> Queue:
        made.append(settings)
        return Queue()

    monkeypatch.setattr(bus_module, "Consumer", consumer)
    bus = bus_module.KafkaBus("here:9092", "run")
    bus.reader()
    bus.reader({P0: 0})
    assert ["10", None] == [settings.get("fetch.wait.max.ms") for settings in made]
