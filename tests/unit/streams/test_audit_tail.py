"""An audit reads a topic in stretches: all below the end that was asked, and not a record more."""

from __future__ import annotations

import pytest

from rlstreams.streams.audit.auditor import Tail
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import PROMPTS
from tests.logs import made_log
from tests.memory.bus import MemoryBus

ONE, TWO = Partition(PROMPTS.name, 0), Partition(PROMPTS.name, 1)


@pytest.fixture
def bus() -> Bus:
    """Three records of one partition and two of another; a marker lies behind each."""
    bus = MemoryBus(made_log(partitions=2), "run")
    sent = [
        Outgoing(topic=PROMPTS.name, key=b"", value=[b"v"], partition=n) for n in (0, 0, 0, 1, 1)
    ]
    with bus.producer("p") as producer:
        producer.commit(sent)
    return bus


def tail_of(bus: Bus, deadline_s: float = 1.0) -> Tail:
    return Tail(bus, {ONE: 0, TWO: 0}, deadline_s)


def read(tail: Tail, one: int, two: int) -> list[tuple[int, int]]:
    return sorted(raw.position[1:] for raw in tail.up_to({ONE: one, TWO: two}))


def test_a_partition_that_does_not_deliver_is_named(bus: Bus) -> None:
    """With where it is, and where it should be."""
    with pytest.raises(DeadlineError, match=r"prompts\[1\]: at offset 3 of 9: nothing came"):
        read(tail_of(bus, deadline_s=0.0), 1, 9)
