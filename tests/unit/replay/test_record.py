"""The end of a recording: what the log and the run's folder hold by then is in it, and on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.events import Event
from streams.codec import outgoing
from streams.errors import BrokerError
from streams.memory.bus import MemoryBus
from streams.memory.consumer import MemoryReader
from streams.recording import Recording
from streams.recording.recorder import DONE
from streams.recording.selection import Selection
from streams.topics import TOPICS
from tests import factories
from tests.logs import made_log
from tests.unit.recording.recordings import TOPIC_OF
from workers.config.run import RunConfig, RunSection
from workers.replay import record as module
from workers.replay.record import Copies, RecordingOptions, RecordingResult, record

BY_NAME = {topic.name: topic for topic in TOPICS}


class World:
    """A run in memory with a folder, and a recording of it."""

    def __init__(self, folder: Path) -> None:
        self.bus = MemoryBus(made_log("r", 2), "r")
        self.run = folder / "run"
        self.folder = folder / "rec"
        (self.run / "weights").mkdir(parents=True)

    def say(self, *events: Event) -> None:
        records = [outgoing(BY_NAME[TOPIC_OF[type(e).__name__]], e) for e in events]
        with self.bus.producer("say") as producer:
            producer.commit(records)

    def weights(self, version: int) -> None:
        (self.run / f"weights/v{version}.safetensors").write_bytes(b"w" * version)

    def record(
        self, stopped: Callable[[], bool] = lambda: False, *, follow: bool = True
    ) -> RecordingResult:
        options = RecordingOptions(
            folder=self.folder,
            selection=Selection(),
            words={},
            is_followed=follow,
            with_weights=True,
        )
        config = RunConfig(run=RunSection(id="r", dir=str(self.run)))
        return record(self.bus, config, options, stopped=stopped)

    def copied(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "weights").glob("*"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_weights_that_came_last_are_copied_at_once(world: World) -> None:
    """However short after the copy before: the run may remove them, and nobody looks again."""
    world.weights(1)

    def stopped() -> bool:
        if world.copied():
            world.weights(2)
        return bool(world.copied())

    world.record(stopped)
    assert ["v1.safetensors", "v2.safetensors"] == world.copied()


def test_what_a_run_commits_while_it_falls_quiet_is_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends of the topics are asked for once more."""
    world.say(factories.trainer_started(), factories.heartbeat(state=DONE))
    monkeypatch.setattr(module, "QUIET_S", -1.0)

    looks: list[int] = []

    class Late(Copies):
        """Something is committed between the last look at the log and the end."""

        def take(self, *, is_last: bool = False) -> None:
            looks.append(1)
            if len(looks) == 3:  # claim, heartbeat, nothing
                world.say(factories.trajectory())

    monkeypatch.setattr(module, "Copies", Late)
    made = world.record()
    with Recording(world.folder) as recording:
        assert 1 == len(list(recording.records(["trajectories"])))
    ends = {p: end for topic in TOPICS for p, end in world.bus.ends(topic.name).items()}
    told = {(n, p): at for n, t in made.manifest.topics.items() for p, at in t.next.items()}
    assert ends == {p: told[p.topic, str(p.number)] for p in ends}


def test_a_recorder_whose_broker_goes_away_keeps_what_it_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed, and the weights copied; the same command goes on with it."""
    world.say(factories.heartbeat(), factories.heartbeat())
    world.weights(1)
    polled = []

    def poll(self: MemoryReader, max_records: int, timeout_s: float) -> object:
        polled.append(real(self, max_records, timeout_s))
        if len(polled) > 2:
            raise BrokerError("gone")
        world.weights(2)
        return polled[-1]

    real = MemoryReader.poll
    with monkeypatch.context() as broken:
        broken.setattr(MemoryReader, "poll", poll)
        with pytest.raises(BrokerError, match="gone"):
            world.record()
    with Recording(world.folder) as recording:
        assert 2 == recording.num_records
    assert ["v1.safetensors", "v2.safetensors"] == world.copied()
    again = world.record(follow=False)
    assert (True, 2, 0) == (again.is_resumed, again.num_records, again.num_new)


def test_a_sealed_recording_is_on_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file that its manifest names was synced before it was called sealed, and the names."""
    world.say(*factories.one_of_each().values())
    world.weights(1)
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    made = world.record(follow=False)
    assert {str(world.folder / file.name) for file in made.manifest.files} <= set(synced)
    assert {str(world.folder), str(world.folder / "weights")} <= set(synced)
    assert str(world.folder) == synced[-1]
