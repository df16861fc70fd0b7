"""A broker that dies while records are read, and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.record import Outgoing, RawRecord
from tests.contract.buses import KafkaCluster
from tests.contract.polling import P0, WAIT_S, within

TURN_S = 2.0  # a turn of `up` takes a tenth of that on an idle machine
NUM_BYTES = 60_000_000  # more than the client fetches ahead


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker that the test may kill."""
    embedded = EmbeddedBroker(tmp_path / "broker")
    yield embedded
    embedded.stop()


def test_a_record_that_was_half_read_when_the_broker_died_comes_whole_after_it(
    own_broker: EmbeddedBroker,
):
    """For a reader and for a group's member; until then their polls bring nothing."""
    state = own_broker.start()
    KafkaCluster(state.bootstrap, "run").create("t", 1)
    bus = KafkaBus(state.bootstrap, "run", outage_s=2 * WAIT_S)
    large = os.urandom(NUM_BYTES)
    with bus.producer("p") as producer:
        producer.commit([Outgoing(topic="t", key=b"k", value=(large,), partition=0)])
    with bus.reader({P0: 0}) as reader, bus.consumer("g", ["t"]) as member:
        polls: list[Callable[[float], Sequence[RawRecord]]] = [
            lambda timeout_s: reader.poll(1, timeout_s),
            lambda timeout_s: member.poll(1, timeout_s).records,
        ]
        for poll, feed in zip(polls, (reader._feed, member._feed), strict=True):

            def is_half_read(poll=poll, feed=feed) -> bool | None:
                assert [] == list(poll(0.0)), "it was read in one poll"
                return True if feed.assembler.incomplete() else None

            within(WAIT_S, is_half_read, "a part came")
        os.kill(state.pid, signal.SIGKILL)
        for poll in polls * 100:  # what was fetched is used up, and the range is asked for
            assert [] == list(poll(0.01))
        within(WAIT_S, lambda: own_broker.status() is None or None, "the broker is gone")
        own_broker.start()
        for poll in polls:
            (record,) = within(WAIT_S, lambda poll=poll: poll(0.1) or None, "the record")
            assert large == bytes(record.value)
