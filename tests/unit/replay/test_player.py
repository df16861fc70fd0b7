"""Playing a recording: what goes where, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlstreams.debug.replay.player import REPLAY_HEADER, chosen, play, range_of, selection_of
from rlstreams.schemas.events import StepCompleted, Trajectory
from rlstreams.streams.log.errors import AbortedError, BrokerError, ConfigError
from rlstreams.streams.log.record import Outgoing, Position, RawRecord
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.recording import NotRecordedError, Recording
from tests import factories
from tests.memory.bus import MemoryBus, MemoryProducer
from tests.memory.log import MemoryLog
from tests.unit.recording.recordings import raw_of, record, trajectories


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.001)


def make_bus() -> MemoryBus:
    log = MemoryLog()
    for topic in TOPICS:
        log.create(f"fresh.{topic.name}", 2)
    return MemoryBus(log, "fresh")


def read(bus: MemoryBus, topic: str) -> list[RawRecord]:
    with bus.reader(bus.beginnings(topic)) as reader:
        return list(reader.poll(10_000, 0.0))


def a_run() -> Iterator[RawRecord]:
    """Two steps: groups 0 and 1, then groups 2 and 3; group 3 has a dead letter."""
    yield from trajectories(16)
    for step, groups in ((1, "01"), (2, "23")):
        refs = tuple(factories.sample_ref(g, s) for g in groups for s in range(4))
        event = factories.step_completed(step, samples=refs, policy_version=step)
        yield raw_of(event, step, timestamp_ms=factories.NOW_MS + 8 * step)
    yield raw_of(factories.dead_letter(group_id="3", sample=0), 0)


def test_records_arrive_byte_for_byte_where_they_lay(tmp_path: Path) -> None:
    """Same partition, key, value and headers; a new one says where it was recorded."""
    raws = record(tmp_path / "r", trajectories(20))
    bus = make_bus()
    with Recording(tmp_path / "r") as recording:
        played = play(bus, "r", recording.records())

    found = read(bus, "trajectories")
    by_origin = {raw.headers[REPLAY_HEADER].decode(): raw for raw in found}
    for raw in raws:
        copy = by_origin[f"r/{raw.position}"]
        assert (raw.partition, raw.key, raw.value) == (copy.partition, copy.key, copy.value)
        assert dict(raw.headers) == {k: v for k, v in copy.headers.items() if k != REPLAY_HEADER}
    assert (20, 20) == (played.num_records, len(found))


def test_a_partition_keeps_its_order(tmp_path: Path) -> None:
    record(tmp_path / "r", trajectories(50))
    bus = make_bus()
    with Recording(tmp_path / "r") as recording:
        play(bus, "r", recording.records())

    for partition in (0, 1):
        origins = [
            raw.headers[REPLAY_HEADER].decode()
            for raw in read(bus, "trajectories")
            if raw.position.partition == partition
        ]
        assert [f"r/trajectories[{partition}]@{n}" for n in range(25)] == origins


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, 19.0), (10.0, 1.9), (math.inf, 0.0)])
def test_the_recorded_pace_is_kept_or_scaled(speed: float, seconds: float) -> None:
    """Twenty records, a second apart."""
    raws = [
        raw_of(factories.heartbeat(), n, timestamp_ms=factories.NOW_MS + 1000 * n)
        for n in range(20)
    ]
    clock = Clock()
    played = play(make_bus(), "r", raws, speed, now_s=clock, sleep=clock.sleep)

    assert 20 == played.num_records
    assert seconds == pytest.approx(clock.now_s, abs=0.2)


class Stumbling(MemoryBus):
    """A bus whose producer's first transactions are aborted."""

    def __init__(self, num_aborts: int) -> None:
        log = MemoryLog()
        for topic in TOPICS:
            log.create(f"fresh.{topic.name}", 2)
        super().__init__(log, "fresh")
        self._num_aborts = num_aborts

    def producer(self, transactional_id: str) -> MemoryProducer:
        made = super().producer(transactional_id)
        send = made.commit

        def stumble(records: Sequence[Outgoing]) -> Sequence[Position]:
            if not self._num_aborts:
                return send(records)
            self._num_aborts -= 1
            raise AbortedError("as it happens")

        made.commit = stumble  # type: ignore[method-assign, assignment]
        return made


def test_an_aborted_stream_is_sent_again_from_its_first_record(tmp_path: Path) -> None:
    """What had been taken from the recording, then the rest: nothing lost, nothing twice."""
    raws = record(tmp_path / "r", trajectories(20))
    bus = Stumbling(num_aborts=2)
    with Recording(tmp_path / "r") as recording:
        played = play(bus, "r", recording.records())

    origins = sorted(raw.headers[REPLAY_HEADER].decode() for raw in read(bus, "trajectories"))
    assert sorted(f"r/{raw.position}" for raw in raws) == origins
    assert 20 == played.num_records


def test_a_stream_that_is_aborted_again_and_again_ends_the_replay() -> None:
    """With the broker's reason."""
    with pytest.raises(BrokerError, match="as it happens"):
        play(Stumbling(num_aborts=99), "r", trajectories(20))


def test_steps_choose_samples_with_all_that_is_about_them(tmp_path: Path) -> None:
    """A step's groups come with it, its neighbours do not; what is not there is said."""
    record(tmp_path / "r", a_run())
    with Recording(tmp_path / "r") as recording:

        def told(text: str) -> tuple[set[str], list[int]]:
            selected = chosen(recording, selection_of(recording, range_of(text)))
            events = [recording.event(raw) for raw in selected]
            groups = {e.group_id for e in events if isinstance(e, Trajectory)}
            return groups, [e.step for e in events if isinstance(e, StepCompleted)]

        assert ({"2", "3"}, [2]) == told("2:") == told("2")
        assert ({"0", "1"}, [1]) == told(":1")
        assert {"0", "1", "2", "3"} == told("")[0]
        with pytest.raises(NotRecordedError, match="there is steps 1 to 2"):
            told("9:")
    for text in ("3:2", "a:", "1:b"):
        with pytest.raises(ConfigError, match="--steps"):
            range_of(text)
