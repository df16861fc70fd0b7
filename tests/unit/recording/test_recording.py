"""Recordings: what goes in comes out, and is found."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas import schema_text
from rlstreams.schemas.events import Event, StepCompleted, Trajectory
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.recording import NotRecordedError, Recording, RecordingError, RecordingWriter
from tests import factories
from tests.unit.recording.recordings import (
    manifest,
    opaque,
    positions_after,
    raw_of,
    record,
    trajectories,
)
from tests.unit.schemas.strategies import events


def one_of_each() -> list[RawRecord]:
    return [
        raw_of(event, 10 * number, parts=1 + number % 3)
        for number, event in enumerate(factories.one_of_each().values())
    ]


def by_position(raws: list[RawRecord]) -> list[RawRecord]:
    return sorted(raws, key=lambda raw: raw.position)


def test_every_kind_of_record_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Position, part offsets, key, headers, time and every byte of the value."""
    raws = record(tmp_path / "r", [*one_of_each(), opaque(3), opaque(4, b""), opaque(5, b"\xc3")])

    with Recording(tmp_path / "r") as recording:
        assert by_position(raws) == by_position(list(recording.records()))
        assert () == recording.problems


@settings(max_examples=8, deadline=None)
@given(some=st.lists(events(), min_size=1, max_size=8))
def test_any_event_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, some: list[Event]
) -> None:
    """Whatever the fields hold."""
    folder = tmp_path_factory.mktemp("any") / "r"
    raws = record(folder, [raw_of(event, offset) for offset, event in enumerate(some)])

    with Recording(folder) as recording:
        assert by_position(raws) == by_position(list(recording.records()))


def test_other_avro_tools_read_every_file(tmp_path: Path) -> None:
    """fastavro finds the schema inside, and the fields that it reads from the wire itself."""
    raws = {raw.position: raw for raw in record(tmp_path / "r", [*one_of_each(), opaque(3)])}
    seen = 0
    for path in (tmp_path / "r").rglob("*.avro"):
        with path.open("rb") as file:
            reader = fastavro.reader(file)
            topic, name = reader.metadata["rlstreams.topic"], reader.metadata["rlstreams.event"]
            for found in reader:
                raw = raws[Position(topic, 0, found["offset"])]
                expected: object = raw.value
                if name != "bytes":
                    schema = fastavro.parse_schema(json.loads(schema_text(name)))
                    expected = fastavro.schemaless_reader(io.BytesIO(raw.value[10:]), schema)
                assert (expected, raw.key, dict(raw.headers)) == (
                    found["event"],
                    found["key"],
                    found["headers"],
                )
                seen += 1
    assert len(raws) == seen


def test_typed_events_come_in_the_order_of_time(tmp_path: Path) -> None:
    """Across partitions by timestamp; within one by offset."""
    raws = record(tmp_path / "r", [*trajectories(40), raw_of(factories.step_completed(), 0)])

    with Recording(tmp_path / "r") as recording:
        found = list(recording.events(Trajectory))

    assert [raw.position for raw in raws[:40]] == [r.position for r in found]
    assert [str(n // 4) for n in range(40)] == [r.event.group_id for r in found]


def test_a_clock_that_went_back_does_not_change_a_partitions_order(tmp_path: Path) -> None:
    """The log's order is by offset, whatever a producer's clock said."""
    times = [50, 10, 60]
    raws = [raw_of(factories.heartbeat(), n, timestamp_ms=t) for n, t in enumerate(times)]
    late = raw_of(factories.worker_report(), 0, timestamp_ms=55)
    record(tmp_path / "r", [*raws, late])

    with Recording(tmp_path / "r") as recording:
        assert [*raws[:2], late, raws[2]] == list(recording.records())


def test_a_record_is_found_by_position_and_by_id(tmp_path: Path) -> None:
    """Without reading the others."""
    raws = record(tmp_path / "r", trajectories(400), block=16)

    with Recording(tmp_path / "r") as recording:
        assert raws[321] == recording.at(raws[321].position)
        (found,) = recording.by_id(Trajectory, "80", 1)
        assert raws[321] == found.raw
        assert 4 == len(recording.by_id(Trajectory, "80"))
        with pytest.raises(NotRecordedError, match=r"200 records of trajectories\[1\]"):
            recording.at(Position("trajectories", 1, 999))


def test_a_start_within_a_partition_begins_there(tmp_path: Path) -> None:
    """Seek by offset."""
    raws = record(tmp_path / "r", trajectories(100), block=8)
    start = {Partition("trajectories", 1): 37}

    with Recording(tmp_path / "r") as recording:
        found = list(recording.records(start=start))

    assert [r for r in raws if r.position.partition == 1 and r.position.offset >= 37] == found


def test_blocks_are_asked_of_the_index_once_however_often_one_seeks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which goes through all rows of a file; a redo seeks for every step."""
    record(tmp_path / "r", trajectories(100), block=8)
    partition = Partition("trajectories", 1)
    asked: list[int] = []
    with Recording(tmp_path / "r") as recording:
        known_blocks = recording.index.known_blocks

        def ask(number: int) -> object:
            asked.append(number)
            return known_blocks(number)

        monkeypatch.setattr(recording.index, "known_blocks", ask)
        for start in (0, 20, 37):
            assert start == next(recording.partition(partition, start=start)).position.offset
    assert 1 == len(asked)


def test_what_steps_trained_on_is_indexed(tmp_path: Path) -> None:
    """From a sample to its step, and back."""
    step = factories.step_completed(step=3)
    record(tmp_path / "r", [raw_of(step, 0)])

    with Recording(tmp_path / "r") as recording:
        trained = recording.index.trained(step=3)
        assert [(s.group_id, s.sample) for s in step.samples] == [
            (t.group_id, t.sample) for t in trained
        ]
        (one,) = recording.index.trained(
            group_id=step.samples[0].group_id, sample=step.samples[0].sample
        )
        assert (3, step.samples[0].offset) == (one.step, one.offset)
        assert [3] == [r.event.step for r in recording.events(StepCompleted)]


def test_a_killed_recorder_is_gone_on_with(tmp_path: Path) -> None:
    """What was not committed is cut off, and is written once."""
    raws = list(trajectories(60))
    writer = RecordingWriter(tmp_path / "r", manifest())
    for raw in raws[:30]:
        writer.append(raw)
    writer.commit(positions_after(raws[:30]), {})
    for raw in raws[30:40]:
        writer.append(raw)
    for file in writer._open.values():  # a kill between the files and the index
        file.writer.flush()
    writer.close()

    again = RecordingWriter(tmp_path / "r", manifest())
    assert again.is_resumed
    assert {p: span.next for p, span in again.spans.items()} == positions_after(raws[:30])
    for raw in raws[30:]:
        again.append(raw)
    again.commit(positions_after(raws), {})
    again.seal()

    with Recording(tmp_path / "r") as recording:
        assert raws == list(recording.records())
        assert recording.manifest.is_sealed


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    """Up to the last commit."""
    raws = list(trajectories(20))
    writer = RecordingWriter(tmp_path / "r", manifest())
    for raw in raws[:10]:
        writer.append(raw)
    writer.commit(positions_after(raws[:10]), {})
    for raw in raws[10:]:
        writer.append(raw)

    with Recording(tmp_path / "r") as recording:
        assert raws[:10] == list(recording.records())
        assert () == recording.problems
    writer.close()


def test_a_finished_or_foreign_folder_is_not_written_to(tmp_path: Path) -> None:
    """A recording never mixes two runs, nor two times."""
    record(tmp_path / "r", trajectories(2))
    with pytest.raises(RecordingError, match="holds a finished recording"):
        RecordingWriter(tmp_path / "r", manifest())

    record(tmp_path / "open", trajectories(2), seal=False)
    with pytest.raises(RecordingError, match="run 'r', this is 'other'"):
        RecordingWriter(tmp_path / "open", manifest(run="other"))

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me", "utf-8")
    with pytest.raises(RecordingError, match="no recording: name another folder"):
        RecordingWriter(tmp_path / "mine", manifest())


def test_the_schema_of_a_file_is_the_writers(tmp_path: Path) -> None:
    """So that a release that never heard of it can read its events."""
    record(tmp_path / "r", trajectories(1))

    with Recording(tmp_path / "r") as recording:
        (print_,) = recording.schemas
        assert json.loads(schema_text("Trajectory")) == json.loads(recording.schemas[print_])
