"""From a bus into a recording and, read through the same port, back."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.schemas import EVENTS, fingerprint
from rlstreams.schemas.events import (
    Event,
    TrainerHeartbeat,
)
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import DeadlineError, OffsetGoneError, TopicMismatchError
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import STEPS, TOPICS, TRAJECTORIES
from rlstreams.streams.recording import (
    RecordedTopic,
    Recording,
    RecordingError,
    RecordingManifest,
    RecordingWriter,
    writer,
)
from rlstreams.streams.recording.bus import RecordingBus
from rlstreams.streams.recording.recorder import DONE, ORDER, Recorder
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.newer_release import newer, newer_text, publish
from tests.unit.recording.recordings import TOPIC_OF

BY_NAME = {topic.name: topic for topic in TOPICS}


class World:
    """A run in memory, and a folder."""

    def __init__(self, folder: Path, part_bytes: int = 900_000) -> None:
        self.log = made_log("r", 2)
        self.bus = MemoryBus(self.log, "r", part_bytes=part_bytes)
        self.folder = folder

    def say(self, *events: Event) -> None:
        records = [outgoing(BY_NAME[TOPIC_OF[type(e).__name__]], e) for e in events]
        with self.bus.producer("say") as producer:
            producer.commit(records)

    def manifest(self) -> RecordingManifest:
        names = [topic.name for topic in ORDER]
        ids = self.bus.topic_ids(names)
        return RecordingManifest(
            run="r",
            started_at_ms=1,
            cluster_id="c",
            topics={n: RecordedTopic(id=ids[n], partitions=self.bus.partitions(n)) for n in names},
        )

    def record(self, *, seal: bool = True) -> Recorder:
        with RecordingWriter(self.folder, self.manifest()) as writer:
            with Recorder(self.bus, writer) as recorder:
                recorder.up_to_now()
            if seal:
                writer.seal()
        return recorder

    def on_the_log(self) -> list[RawRecord]:
        found: list[RawRecord] = []
        for topic in TOPICS:
            with self.bus.reader(self.bus.beginnings(topic.name)) as reader:
                found += reader.poll(10_000, 0.0)
        return sorted(found, key=lambda raw: raw.position)

    def recorded(self) -> list[RawRecord]:
        with Recording(self.folder) as recording:
            return sorted(recording.records(), key=lambda raw: raw.position)


def read_all(bus: Bus, topic: str) -> tuple[list[RawRecord], dict[Partition, int]]:
    """The records by position, and where the reader stands at the end."""
    with bus.reader(bus.beginnings(topic)) as reader:
        raws = sorted(reader.poll(1000, 0.0), key=lambda raw: raw.position)
        raws += reader.poll(1000, 0.0)
        return raws, dict(reader.positions())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "rec")


def test_a_run_is_recorded_as_it_lies(tmp_path: Path) -> None:
    """Every record of every topic; one in parts lies at its part 0, and keeps their offsets."""
    world = World(tmp_path / "rec", part_bytes=100)
    world.say(*factories.one_of_each().values())
    world.record()

    assert world.on_the_log() == world.recorded()
    assert any(len(raw.offsets) > 1 for raw in world.recorded())


def test_recording_goes_on_where_it_was_interrupted(world: World) -> None:
    """Nothing twice, nothing missing, whatever came meanwhile."""
    world.say(*(factories.trajectory(group_id=str(n)) for n in range(10)))
    world.record(seal=False)
    world.say(*(factories.trajectory(group_id=str(n)) for n in range(10, 20)))
    world.record()

    assert world.on_the_log() == world.recorded()


def test_a_resumed_recording_says_if_retention_was_faster(world: World) -> None:
    """Rather than leave a hole."""
    world.say(*(factories.heartbeat() for _ in range(5)))
    world.record(seal=False)
    world.say(*(factories.heartbeat() for _ in range(5)))
    world.log.trim(Partition("r.steps", 0), 9)

    with pytest.raises(OffsetGoneError):
        world.record()


def test_a_schema_that_cannot_be_asked_for_costs_no_record(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are there, and they are read once the recording holds the schema."""
    beat = outgoing(STEPS, factories.heartbeat())
    with world.bus.producer("newer") as producer:
        producer.commit([beat, newer(beat), beat])

    class Away:
        def get(self, _print: bytes) -> str | None:
            raise DeadlineError("looking a schema up in schemas[0]")

    with monkeypatch.context() as patch:
        patch.setattr(world.bus, "schemas", Away)
        world.record(seal=False)
    assert world.on_the_log() == world.recorded()
    publish(world.bus)
    world.record()
    with Recording(world.folder) as recording:
        assert 3 == len(list(recording.events(TrainerHeartbeat)))


def test_a_recording_that_a_newer_release_made_is_read_by_the_schemas_of_its_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are its own ones to whoever recorded, so no footer has them; the topic does."""
    beat = outgoing(STEPS, factories.heartbeat())
    publish(world.bus)
    with world.bus.producer("newer") as producer:
        producer.commit([beat, newer(beat)])
    with monkeypatch.context() as patch:
        theirs = frozenset(fingerprint(newer_text(kind.__name__)) for kind in EVENTS)
        patch.setattr(writer, "own_prints", lambda: theirs)
        world.record()
    with Recording(world.folder) as recording:
        assert theirs == recording.schemas.keys()
        assert 2 == len(list(recording.events(TrainerHeartbeat)))


def test_the_end_of_a_run_is_seen(world: World) -> None:
    """By what the newest trainer said last."""
    world.say(factories.trainer_started(epoch=2), factories.heartbeat(epoch=2, state=DONE))
    assert DONE == world.record(seal=False).trainer_state
    world.say(factories.trainer_started(epoch=3))
    assert "" == world.record(seal=False).trainer_state


def test_a_recording_is_read_through_the_port_of_a_run(world: World) -> None:
    """Ends, positions and records are those of the log; the audit says the same of both."""
    world.say(*factories.one_of_each().values())
    world.record()
    with Recording(world.folder) as recording:
        bus = RecordingBus(recording)
        for topic in (STEPS.name, TRAJECTORIES.name):
            assert world.bus.ends(topic) == bus.ends(topic)
            assert world.bus.partitions(topic) == bus.partitions(topic)
            assert read_all(world.bus, topic) == read_all(bus, topic)
        assert audit(world.bus, settle_s=0.0).line() == audit(bus, settle_s=0.0).line()


def test_a_recording_is_not_written_to_nor_asked_for_what_it_lacks(world: World) -> None:
    """Each refusal says what is there."""
    world.say(factories.heartbeat(), factories.heartbeat())
    world.log.trim(Partition("r.steps", 0), 1)
    world.record()
    with Recording(world.folder) as recording:
        bus = RecordingBus(recording)
        with pytest.raises(RecordingError, match="only read"):
            bus.producer("trainer.0")
        with pytest.raises(RecordingError, match="has no groups"):
            bus.consumer("rollout", ["prompts"])
        with pytest.raises(OffsetGoneError, match="begins at 1"):
            bus.reader({Partition("steps", 0): 0})
        with pytest.raises(TopicMismatchError, match="unheard is not in"):
            bus.partitions("unheard")
        assert recording.at(Position("steps", 0, 1)).position.offset == 1
