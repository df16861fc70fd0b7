"""The end of a recording: what the log and the run's folder hold by then is in it, and on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.replay import record as module
from rlstreams.debug.replay.record import Copies, RecordingOptions, RecordingResult, record
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import Event, TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import STEPS, TOPICS
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.recorder import DONE
from rlstreams.workers.config.run import RunConfig, RunSection
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryReader
from tests.newer_release import newer, publish
from tests.unit.recording.recordings import TOPIC_OF

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
        self,
        stopped: Callable[[], bool] = lambda: False,
        *,
        follow: bool = True,
    ) -> RecordingResult:
        options = RecordingOptions(
            folder=self.folder,
            is_followed=follow,
            with_weights=True,
        )
        config = RunConfig(run=RunSection(id="r", dir=str(self.run)))
        return record(self.bus, config, options, stopped=stopped)

    def copied(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "weights").glob("*"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "QUIET_S", 0.2)
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
            if len(looks) == 2:  # claim and heartbeat, nothing
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


def test_a_strangers_record_beside_the_claims_ends_no_recording(world: World) -> None:
    """It is looked for in the same topic, and is no claim."""
    claim = factories.trainer_started()
    with world.bus.producer("stranger") as producer:
        noise = Outgoing(topic=STEPS.name, key=b"r", value=[b"noise"], partition=0)
        producer.commit([noise, outgoing(STEPS, claim), noise])
    made = world.record(follow=False)
    assert claim.config == made.manifest.config
    with Recording(world.folder) as recording:
        assert [claim] == [record.event for record in recording.events(TrainerStarted)]


class Away:
    """The catalogue of a run whose broker was stopped."""

    def get(self, _print: bytes) -> str | None:
        raise BrokerError("looking a schema up in schemas[0]: nobody to ask")


def unread(world: World) -> list[Outgoing]:
    """A record under a schema that nobody has, between two that anybody reads."""
    beat = outgoing(STEPS, factories.heartbeat(state=DONE))
    odd = replace(beat, value=[MARKER + b"12345678" + b"body"])
    with world.bus.producer("newer") as producer:
        producer.commit([beat, odd, odd, beat])
    return [beat, odd, odd, beat]


def test_a_record_whose_schema_nobody_can_be_asked_for_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte."""
    world.say(factories.trainer_started())
    values = [b"".join(record.value) for record in unread(world)]
    monkeypatch.setattr(world.bus, "schemas", Away)
    made = world.record()
    assert made.manifest.is_sealed
    with Recording(world.folder) as recording:
        (claim, *found) = [bytes(raw.value) for raw in recording.partition(Partition("steps", 0))]
    assert values == found
    assert claim


def test_a_schema_that_was_recorded_is_not_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the topic `schemas`, wherever between the other records that comes."""
    world.say(factories.trainer_started(), factories.heartbeat(state=DONE))
    with world.bus.producer("newer") as producer:
        producer.commit([newer(outgoing(STEPS, factories.heartbeat(state=DONE)))])
    publish(world.bus)
    monkeypatch.setattr(world.bus, "schemas", Away)
    world.record()
    with Recording(world.folder) as recording:
        assert 2 == len(list(recording.events(TrainerHeartbeat)))


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
    names = {file.name.replace("000000.parquet", ".open.tmp") for file in made.manifest.files}
    assert {str(world.folder / name) for name in names} <= set(synced)
    assert {str(world.folder), str(world.folder / "weights")} <= set(synced)
    assert str(world.folder) == synced[-1]
