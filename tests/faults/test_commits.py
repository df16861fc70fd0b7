"""Transactions over a network that fails: each record once, and each wait ends by its deadline."""

from __future__ import annotations

import time

import pytest

from rlstreams.schemas.events import WorkerReport
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import ANSWER_S, KafkaBus
from rlstreams.streams.log.bus import Producer
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import BrokerError, OutcomeUnknownError
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import WORKER_EVENTS
from tests import factories
from tests.faults.proxied import END_TXN, Proxied, is_request
from tests.faults.proxy import Weather

COMMIT_S = 3.0
SLACK_S = 30.0  # for a busy machine, and questions that had begun
PLAN = TopicPlan(rollout_workers=1, logprob_workers=1)


@pytest.fixture
def bus(proxied: Proxied, run_id: str) -> KafkaBus:
    apply(proxied.bootstrap, run_id, PLAN)
    return KafkaBus(proxied.bootstrap, run_id, commit_s=60.0)


def report(number: int) -> Outgoing:
    return outgoing(WORKER_EVENTS, factories.worker_report(counters={"number": float(number)}))


def written(bus: KafkaBus) -> list[int]:
    """The number of each committed report, in the log's order."""
    found: list[int] = []
    with bus.reader(bus.beginnings(WORKER_EVENTS.name)) as reader:
        ends = bus.ends(WORKER_EVENTS.name)
        while reader.positions() != ends:
            for raw in reader.poll(100, 0.2):
                event = decoded(raw).event
                assert isinstance(event, WorkerReport)
                found.append(int(event.counters["number"]))
    return found


def commit_all(producer: Producer, proxied: Proxied, first: int) -> int:
    """Transactions of two reports each until the trigger has fired, and one more."""
    number = first
    while proxied.proxy.is_armed:
        producer.commit([report(number), report(number + 1)])
        number += 2
    producer.commit([report(number)])
    return number + 1


@pytest.mark.parametrize("after", [False, True], ids=["request-lost", "answer-lost"])
def test_a_cut_in_the_middle_of_a_commit(bus: KafkaBus, proxied: Proxied, after: bool) -> None:
    """Whether the request to end the transaction or its answer is lost: everything once."""
    with bus.producer("cut") as producer:
        producer.commit([report(0)])
        before = proxied.proxy.num_cut
        proxied.proxy.cut_at(lambda chunk: is_request(END_TXN, chunk), after=after)
        end = commit_all(producer, proxied, first=1)
        assert proxied.proxy.num_cut > before

    assert list(range(end)) == written(bus)


def test_a_black_hole_longer_than_the_commit_deadline(
    bus: KafkaBus, proxied: Proxied, run_id: str
) -> None:
    """The commit gives up by its deadline and says whose it was; a new start settles it."""
    hasty = KafkaBus(proxied.bootstrap, run_id, commit_s=COMMIT_S)
    with hasty.producer("hole") as producer:
        producer.commit([report(0)])
        proxied.proxy.hurt(Weather(swallow=True))
        begun = time.monotonic()
        with pytest.raises(
            OutcomeUnknownError, match=r"transactional id t\w+\.hole: no answer.* 3 s"
        ):
            producer.commit([report(1)])
        assert time.monotonic() - begun < COMMIT_S + SLACK_S
    proxied.proxy.calm()

    with bus.producer("hole") as successor:
        if 1 not in written(bus):
            successor.commit([report(1)])
        successor.commit([report(2)])
    assert [0, 1, 2] == written(bus)


def test_half_a_second_each_way(bus: KafkaBus, proxied: Proxied) -> None:
    """Slow is no failure."""
    with bus.producer("slow") as producer:
        producer.commit([report(0)])
        proxied.proxy.hurt(Weather(delay_s=0.25))
        producer.commit([report(1)])
        proxied.proxy.calm()
        producer.commit([report(2)])
    assert [0, 1, 2] == written(bus)


@pytest.mark.slow
def test_a_question_to_a_black_hole_is_given_up(bus: KafkaBus, proxied: Proxied) -> None:
    """It names what was asked, and where."""
    proxied.proxy.hurt(Weather(swallow=True))
    begun = time.monotonic()
    with pytest.raises(BrokerError, match=f"{proxied.bootstrap}: .*worker-events"):
        bus.ends(WORKER_EVENTS.name)
    assert time.monotonic() - begun < ANSWER_S + SLACK_S
