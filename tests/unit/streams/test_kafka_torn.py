"""Half a record, and a broker that does not say where its partition ends."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rlstreams.streams.kafka import feed as module
from rlstreams.streams.kafka.errors import Outage
from rlstreams.streams.kafka.feed import KafkaFeed
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.parts import Message, part_headers
from rlstreams.streams.log.record import Partition

P = Partition("t", 0)


class Leaderless:
    """A client that answers with these errors in turn, then with the range."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.num_asked = 0

    def get_watermark_offsets(self, _tp: TopicPartition, **_options: Any) -> tuple[int, int]:
        self.num_asked += 1
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return 0, 9


def half_read(client: Leaderless, *records: str) -> KafkaFeed:
    """A feed that has the first part of two, of each record."""
    feed = KafkaFeed(client, "run", "here:9092", Outage("here:9092", 60.0))
    for offset, name in enumerate(records):
        headers = dict(part_headers({}, name, 0, 2))
        assert feed.assembler.add(Message(P, offset, b"k", b"half", headers, 0)) is None
    return feed


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The range is asked for at once."""
    monkeypatch.setattr(module, "TORN_S", -1.0)


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._DESTROY_BROKER,
    ],
)
def test_a_record_waits_as_long_as_nobody_says_whether_it_ends(code: int):
    """Whoever reads through a broker's restart goes on behind it; then it is given up as usual."""
    feed = half_read(Leaderless(code, code), "a")
    assert [] == [*feed.torn({P: 9}), *feed.torn({P: 9}), *feed.torn({P: 9})]
    assert [0] == [record.position.offset for record in feed.torn({P: 9})]


def test_an_absent_broker_is_asked_once_for_all_records():
    """Each question may take its time, and whoever polls waits."""
    client = Leaderless(*[KafkaError._TIMED_OUT] * 4)
    feed = half_read(client, "a", "b", "c")
    feed.torn({P: 1})
    assert 1 == client.num_asked


def test_a_refusal_is_an_error_of_ours():
    """Nobody outside of the bus knows the client's."""
    feed = half_read(Leaderless(KafkaError.TOPIC_AUTHORIZATION_FAILED), "a")
    with pytest.raises(BrokerError, match=r"here:9092: asking for the offsets of t.*0.*AUTHORIZ"):
        feed.torn({P: 1})


def test_an_offset_that_is_gone_is_told_without_a_broker_to_name_the_range():
    """It is told once, so it must not be lost in another error."""
    told = str(half_read(Leaderless(KafkaError._UNKNOWN_PARTITION)).gone(P, 3))
    assert "offset 3 was asked for" in told
    assert "0 to 9" in str(half_read(Leaderless()).gone(P, 12))
