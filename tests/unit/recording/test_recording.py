"""Recordings: what goes in comes out, is found, and is read by anybody."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import Event, Trajectory
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.recording import (
    NotRecordedError,
    Recording,
    RecordingError,
    RecordingWriter,
    reader,
    writer,
)
from rlstreams.streams.recording.table import RECORD, RowGroup, read_group
from tests import factories
from tests.late import Late
from tests.unit.recording.recordings import (
    manifest,
    opaque,
    positions_after,
    raw_of,
    record,
    trajectories,
)
from tests.unit.schemas.strategies import events

datasets, polars = Late("datasets"), Late("polars")


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
        assert [] == recording.problems


@settings(max_examples=8, deadline=None)
@given(some=st.lists(events(), min_size=1, max_size=8))
def test_any_event_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, some: list[Event]
) -> None:
    folder = tmp_path_factory.mktemp("any") / "r"
    raws = record(folder, [raw_of(event, offset) for offset, event in enumerate(some)])

    with Recording(folder) as recording:
        assert by_position(raws) == by_position(list(recording.records()))


def test_strangers_read_the_files(tmp_path: Path) -> None:
    """polars and `datasets`, which know nothing of ours."""
    raws = record(tmp_path / "r", [*one_of_each(), opaque(3), *trajectories(40, first=400)])
    files = str(tmp_path / "r/*.parquet")
    values = {raw.position: bytes(raw.value) for raw in raws}

    table = polars.read_parquet(files)
    assert values == {
        Position(*position): value
        for *position, value in table["topic", "partition", "offset", "value"].iter_rows()
    }
    chosen = table.filter((polars.col("event") == "Trajectory") & (polars.col("sample") == "100/2"))
    assert [402 // 2] == chosen["offset"].to_list()
    assert [raws[-1].timestamp_ms] == [table["time"].max().timestamp() * 1000]  # type: ignore[union-attr]

    rows = datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path / "cache"))
    assert values == {
        Position(row["topic"], row["partition"], row["offset"]): row["value"] for row in rows
    }
    steps = rows.filter(lambda row: row["event"] == "StepCompleted")
    assert [factories.step_completed().step] == steps["step"][:]


def test_row_groups_are_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is of one partition, and whoever looks for a group reads few of them."""
    monkeypatch.setattr(writer, "GROUPS_BYTES", 4000)
    raws = record(tmp_path / "r", trajectories(400))
    with Recording(tmp_path / "r") as recording:
        assert 10 < len(recording.groups)
        read: list[RowGroup] = []

        def look(folder: Path, group: RowGroup, columns: Iterable[str] = RECORD) -> object:
            read.append(group)
            return read_group(folder, group, columns)

        monkeypatch.setattr(reader, "read_group", look)
        found = list(recording.keyed("trajectories", [raws[321].key]))
        assert raws[320:322] == found  # of either partition one
        assert len(set(read)) < len(recording.groups) / 2


def test_typed_events_come_in_the_order_of_time(tmp_path: Path) -> None:
    """Across partitions by timestamp; within one as they were delivered, whatever a clock said."""
    raws = record(
        tmp_path / "r", [*trajectories(40), raw_of(factories.step_completed(), 0)], each=7
    )
    with Recording(tmp_path / "r") as recording:
        found = list(recording.events(Trajectory))
    assert [raw.position for raw in raws[:40]] == [r.position for r in found]
    assert [str(n // 4) for n in range(40)] == [r.event.group_id for r in found]

    times = [50, 10, 60]
    raws = [raw_of(factories.heartbeat(), n, timestamp_ms=t) for n, t in enumerate(times)]
    late = raw_of(factories.worker_report(), 0, timestamp_ms=55)
    record(tmp_path / "back", [*raws, late])
    with Recording(tmp_path / "back") as recording:
        assert [*raws[:2], late, raws[2]] == list(recording.records())


def test_a_record_is_found_by_position(tmp_path: Path) -> None:
    """And what is not there is answered with what is."""
    raws = record(tmp_path / "r", trajectories(400), each=16)

    with Recording(tmp_path / "r") as recording:
        assert raws[321] == recording.at(raws[321].position)
        with pytest.raises(NotRecordedError, match=r"200 records of trajectories\[1\]"):
            recording.at(Position("trajectories", 1, 999))
        with pytest.raises(NotRecordedError, match=r"nothing of steps\[0\].* only of trajectories"):
            recording.at(Position("steps", 0, 0))


def test_a_start_within_a_partition_begins_there(tmp_path: Path) -> None:
    raws = record(tmp_path / "r", trajectories(100), each=8)
    start = {Partition("trajectories", 1): 37}

    with Recording(tmp_path / "r") as recording:
        found = list(recording.records(start=start))

    assert [r for r in raws if r.position.partition == 1 and r.position.offset >= 37] == found


def test_a_killed_recorder_is_gone_on_with(tmp_path: Path) -> None:
    """The open file is lost, and is read again; a record that was delivered early is there once."""
    raws = list(trajectories(60))
    killed = RecordingWriter(tmp_path / "r", manifest())
    for raw in raws[:30]:
        killed.append(raw)
    positions = positions_after(raws[:30]) | {Partition("trajectories", 1): 7}  # parts are missing
    killed.commit(positions, {})
    for raw in raws[30:40]:
        killed.append(raw)
    killed._write_groups()
    killed._held.pop_all()  # neither closed nor unlocked by itself
    (tmp_path / "r" / ".writer.lock").unlink()

    with Recording(tmp_path / "r") as recording:  # also while it is written
        assert raws[:30] == list(recording.records())
    with RecordingWriter(tmp_path / "r", manifest()) as again:
        assert again.is_resumed
        assert {p: at for p, (_, at) in again.spans.items()} == positions
        for raw in (raw for raw in raws if raw.position.offset >= positions[raw.partition]):
            again.append(raw)
        again.commit(positions_after(raws), {})
        again.seal()

    with Recording(tmp_path / "r") as recording:
        assert raws == list(recording.records())
        assert recording.manifest.is_sealed


def test_a_file_is_due_when_it_is_large_or_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one never is."""
    (raw, other) = trajectories(2)
    with RecordingWriter(tmp_path / "r", manifest()) as opened:
        monkeypatch.setattr(writer, "ROLL_S", 0.0)
        assert not opened.is_due
        opened.append(raw)
        assert opened.is_due
        opened.commit(positions_after([raw]), {})
        monkeypatch.setattr(writer, "ROLL_S", 60.0)
        opened.append(other)
        assert not opened.is_due
        monkeypatch.setattr(writer, "ROLL_BYTES", 10)
        assert opened.is_due


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
