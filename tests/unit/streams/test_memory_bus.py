"""What `MemoryBus` has beyond the ports: faults for tests."""

from __future__ import annotations

import pytest

from rlstreams.streams.log.errors import AbortedError, OutcomeUnknownError
from rlstreams.streams.log.record import Outgoing, Partition
from tests.memory.bus import MemoryBus
from tests.memory.log import Fault, MemoryLog

P0 = Partition("t", 0)


def record(value: bytes) -> Outgoing:
    return Outgoing(topic="t", key=b"k", value=(value,))


def bus_of(log: MemoryLog) -> MemoryBus:
    log.create("run.t", 1)
    return MemoryBus(log, "run")


def values(bus: MemoryBus) -> list[bytes]:
    with bus.reader({P0: 0}) as reader:
        return [bytes(r.value) for r in reader.poll(100, 0.0)]


def test_a_commit_that_fails_before_it_takes_effect_did_not_happen():
    """It is aborted once; the same producer commits the same batch after that."""
    log = MemoryLog()
    bus = bus_of(log)
    producer = bus.producer("p")
    log.fail_next_commit("run.p", Fault.BEFORE)
    with pytest.raises(AbortedError):
        producer.commit([record(b"1")])
    assert [] == values(bus)
    producer.commit([record(b"1")])
    assert [b"1"] == values(bus)


def test_a_commit_whose_answer_is_lost_did_happen():
    """The producer is dead, its successor finds the record."""
    log = MemoryLog()
    bus = bus_of(log)
    producer = bus.producer("p")
    log.fail_next_commit("run.p", Fault.AFTER)
    for _ in range(2):
        with pytest.raises(OutcomeUnknownError):
            producer.commit([record(b"1")])
    assert [b"1"] == values(bus)
    bus.producer("p").commit([record(b"2")])
    assert [b"1", b"2"] == values(bus)


def test_runs_on_one_log_do_not_meet():
    """Two handles with other run ids share the log and nothing else."""
    log = MemoryLog()
    bus, other = bus_of(log), MemoryBus(log, "other")
    log.create("other.t", 1)
    with bus.producer("p") as producer, other.producer("p") as namesake:
        producer.commit([record(b"1")])
        namesake.commit([record(b"2")])
        producer.commit([record(b"3")])
    assert ([b"1", b"3"], [b"2"]) == (values(bus), values(other))
