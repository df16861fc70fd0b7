"""A member that its group gives partitions to and then says not to know does not stay dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rlstreams.streams.kafka import consumer as module
from rlstreams.streams.kafka.consumer import KafkaGroupConsumer
from rlstreams.streams.kafka.errors import Outage
from rlstreams.streams.kafka.feed import KafkaFeed
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.record import Committed, Partition

Callback = Callable[[object, list[TopicPartition]], None]
GIVEN = [TopicPartition("run.prompts", 3)]


class ForgetfulGroup:
    """A client whose group assigns one partition and answers no question about it."""

    def __init__(self) -> None:
        self.assigned: list[Sequence[TopicPartition]] = []
        self.unassigned: list[Sequence[TopicPartition]] = []
        self.events: list[str] = []  # what the next polls bring

    def subscribe(
        self, _topics: list[str], *, on_assign: Callback, on_revoke: Callback, on_lost: Callback
    ) -> None:
        self._told = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}

    def poll(self, _timeout_s: float) -> None:
        if self.events:
            self._told[self.events.pop(0)](self, GIVEN)

    def committed(self, _tps: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))

    def position(self, tps: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        return tps

    def incremental_assign(self, tps: Sequence[TopicPartition]) -> None:
        self.assigned.append(tps)

    def incremental_unassign(self, tps: Sequence[TopicPartition]) -> None:
        self.unassigned.append(tps)


def member() -> tuple[ForgetfulGroup, KafkaGroupConsumer]:
    client = ForgetfulGroup()
    feed = KafkaFeed(client, "run", "here:9092", Outage("here:9092", 60.0))
    return client, KafkaGroupConsumer(
        lambda: feed, ["run.prompts"], stable_s=60.0, max_poll_s=300.0
    )


def test_a_loss_that_follows_is_all_there_is_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group expelled us between its assignment and our question."""
    client, consumer = member()
    client.events = ["assign"]
    assert {} == consumer.poll(1, 0.0).assigned
    client.events = ["lost"]
    consumer.poll(1, 0.0)
    monkeypatch.setattr(module, "UNSERVED_S", 0.0)
    consumer.poll(1, 0.0)
    assert [] == [tp for tps in client.assigned for tp in tps]
    assert [[]] == client.unassigned  # the client would refuse one that it was never given


def test_an_epoch_that_is_about_to_arrive_is_asked_with_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its heartbeat's answer is on the way: the group knows the member, and tells the position."""
    client, consumer = member()
    answers = [KafkaError.STALE_MEMBER_EPOCH, KafkaError.STALE_MEMBER_EPOCH]

    def committed(tps: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        if answers:
            raise KafkaException(KafkaError(answers.pop()))
        return [TopicPartition(tp.topic, tp.partition, 17) for tp in tps]

    monkeypatch.setattr(client, "committed", committed)
    client.events = ["assign"]
    polled = [consumer.poll(1, 0.0).assigned for _ in range(3) if not time.sleep(0.1)]
    assert {Partition("prompts", 3): Committed(offset=17)} == polled[-1]
    assert [{}, {}] == polled[:-1]


def test_partitions_that_stay_ours_without_a_position_end_the_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would read them for as long as it lives; the error names them."""
    client, consumer = member()
    client.events = ["assign"]
    consumer.poll(1, 0.0)
    monkeypatch.setattr(module, "UNSERVED_S", 0.0)
    with pytest.raises(BrokerError, match=r"prompts\[?.*3.*restart"):
        consumer.poll(1, 0.0)
