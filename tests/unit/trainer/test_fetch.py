"""Records by their positions: in order, each once, from all partitions in one request."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.record import Partition, Position
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.trainer.intake.fetch import RecordGoneError, fetch
from tests import factories
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryReader
from tests.memory.log import MemoryLog

NUM_PARTITIONS, NUM_EACH = 8, 5


@pytest.fixture
def bus() -> MemoryBus:
    log = MemoryLog()
    log.create(f"r.{SCORED.name}", NUM_PARTITIONS)
    bus = MemoryBus(log, "r")
    with bus.producer("logprob.0") as producer:
        for number in range(NUM_PARTITIONS):
            producer.commit([
                outgoing(SCORED, sample(number, at), partition=number) for at in range(NUM_EACH)
            ])  # fmt: skip
    return bus


def sample(number: int, at: int) -> ScoredTrajectory:
    of = factories.trajectory(group_id=str(number), sample=at, group_size=9)
    return factories.scored(of)


def test_all_partitions_are_asked_at_once(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kafka client that turns to another partition waits for its last request, up to half a
    second: of eight partitions one after the other a redo took four times as long."""
    asked: list[set[Partition]] = []
    seek = MemoryReader.seek

    def seen(self: MemoryReader, offsets: Mapping[Partition, int]) -> None:
        if offsets:
            asked.append({*offsets})
        seek(self, offsets)

    monkeypatch.setattr(MemoryReader, "seek", seen)
    wanted = [Position(SCORED.name, n, at) for at in (3, 1) for n in range(NUM_PARTITIONS)]
    found = fetch(bus, wanted)
    assert [{Partition(SCORED.name, n) for n in range(NUM_PARTITIONS)}] == asked
    assert wanted == [raw.position for raw in found]
    samples = [decoded(raw).event.trajectory for raw in found]  # type: ignore[union-attr]
    assert [(str(p.partition), p.offset) for p in wanted] == [
        (one.group_id, one.sample) for one in samples
    ]


def test_a_position_without_a_record_is_named(bus: MemoryBus) -> None:
    """The others of its step are there."""
    gone = Position(SCORED.name, 2, NUM_EACH)  # where the commit's marker lies
    with bus.producer("logprob.0") as producer:
        producer.commit([outgoing(SCORED, sample(2, NUM_EACH), partition=2)])
    with pytest.raises(RecordGoneError, match=r"scored-trajectories\[2\]@5 holds no committed"):
        fetch(bus, [Position(SCORED.name, 0, 0), gone], deadline_s=5.0)
