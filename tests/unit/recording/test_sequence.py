"""Records that are missing, moved or there twice are named when a recording is opened or read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.streams.log.record import PART_HEADER, Partition, Position, RawRecord
from rlstreams.streams.recording import DamagedError, Recording, RecordingWriter
from rlstreams.streams.recording.container import ContainerReader
from rlstreams.streams.recording.verify import verify
from tests import factories
from tests.unit.recording.recordings import manifest, raw_of, record

STEPS = Partition("steps", 0)


def beats(offsets: range) -> list[RawRecord]:
    return [raw_of(factories.heartbeat(), n) for n in offsets]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One file with five blocks of two records."""
    record(tmp_path / "r", beats(range(10)), block=2)
    return tmp_path / "r"


def rearranged(folder: Path, order: list[int]) -> None:
    """The file with only these of its blocks, in this order."""
    (path,) = folder.rglob("*.avro")
    reader = ContainerReader(path)
    spans = [(block.at, block.end) for block in reader.blocks()]
    data, header = path.read_bytes(), reader.header.size_bytes
    reader.close()
    path.write_bytes(data[:header] + b"".join(data[slice(*spans[n])] for n in order))


@pytest.mark.parametrize("order", [[0, 2, 3, 4], [0, 1, 3, 2, 4], [0, 0, 1, 2, 3], [1, 2, 3, 4, 0]])
def test_a_block_that_is_missing_or_moved_is_named_when_it_is_read(
    small: Path, order: list[int]
) -> None:
    """Although every block for itself is whole: the index knows which are where."""
    rearranged(small, order)
    place = next(n for n, block in enumerate(order) if block != n)
    told = rf"steps/.*block at byte \d+.*: it held 2 records, steps\[0\]@{2 * place} to "
    with Recording(small) as recording, pytest.raises(DamagedError, match=told):
        list(recording.records())


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 3, 2, 4], [0, 1, 1, 2, 3, 4]])
def test_without_an_index_the_order_of_offsets_tells(
    tmp_path: Path, order: list[int], is_sealed: bool
) -> None:
    """An offset that is there twice, or behind a higher one."""
    record(tmp_path / "r", beats(range(10)), block=2, seal=is_sealed)
    rearranged(tmp_path / "r", order)
    (tmp_path / "r" / "index.sqlite").unlink()
    with Recording(tmp_path / "r") as recording:
        told = r"steps/.*block at byte \d+: steps\[0\]@\d is not behind offset \d"
        with pytest.raises(DamagedError, match=told):
            list(recording.records())


@pytest.mark.parametrize("order", [[0, 2, 3, 4], [0, 1, 2, 3]])
def test_without_an_index_the_manifest_counts(small: Path, order: list[int]) -> None:
    """When the recording is opened."""
    rearranged(small, order)
    (small / "index.sqlite").unlink()
    with Recording(small) as recording:
        assert not recording.is_whole
        (told,) = [text for text in recording.problems if text.startswith("steps/")]
        assert "holds 8 records of 10: 2 records are missing" in told
    assert told in verify(small).problems


def test_a_file_that_is_gone_with_the_index_is_missed_by_the_manifest(tmp_path: Path) -> None:
    """Which names every file of a sealed recording."""
    record(tmp_path / "r", [*beats(range(4)), raw_of(factories.worker_report(), 0)])
    (tmp_path / "r" / "index.sqlite").unlink()
    next((tmp_path / "r" / "steps").iterdir()).unlink()
    with Recording(tmp_path / "r") as recording:
        assert not recording.is_whole
        assert recording.problems[-1].startswith("steps/0-TrainerHeartbeat-")
        assert recording.problems[-1].endswith(".avro is missing: 4 records")


def test_a_missing_index_alone_loses_nothing(small: Path) -> None:
    """It is said, and the recording is whole."""
    (small / "index.sqlite").unlink()
    with Recording(small) as recording:
        assert (True, 1) == (recording.is_whole, len(recording.problems))


def test_gaps_of_markers_and_of_a_selection_are_no_damage(tmp_path: Path) -> None:
    """Transaction markers take offsets, and only chosen records are written."""
    raws = record(tmp_path / "r", [*beats(range(0, 3)), *beats(range(5, 50, 7))])
    with Recording(tmp_path / "r") as recording:
        assert raws == list(recording.records())
        assert (True, ()) == (recording.is_whole, recording.problems)


def parts(first: int, *others: int, torn: bool = False) -> RawRecord:
    raw = raw_of(factories.heartbeat(), first)
    headers = dict(raw.headers) | ({PART_HEADER: b"1/9"} if torn else {})
    return RawRecord(raw.position, (first, *others), raw.key, raw.value, headers, raw.timestamp_ms)


def test_records_whose_parts_lie_between_those_of_others_are_in_order(tmp_path: Path) -> None:
    """A record is delivered with its last part; a torn one whenever it is given up."""
    raws = [parts(4, 5), parts(3, 6), parts(8), parts(2, torn=True), parts(9)]
    record(tmp_path / "r", raws)
    with Recording(tmp_path / "r") as recording:
        assert raws == list(recording.records())


@pytest.mark.parametrize("offsets", [(4, 4), (5, 3)])
def test_parts_that_do_not_follow_each_other_are_damage(
    tmp_path: Path, offsets: tuple[int, ...]
) -> None:
    """No log has them."""
    record(tmp_path / "r", [parts(*offsets)])
    with Recording(tmp_path / "r") as recording, pytest.raises(DamagedError, match="of its parts"):
        list(recording.records())


def test_what_is_delivered_again_is_written_once(tmp_path: Path) -> None:
    """A recorder goes on at a record whose parts had not all come; one behind it had."""
    with RecordingWriter(tmp_path / "r", manifest()) as writer:
        for raw in (parts(1), parts(3)):
            writer.append(raw)
        writer.commit({STEPS: 2}, {STEPS: 0})  # 2 was the first part of a record
    with RecordingWriter(tmp_path / "r", manifest()) as writer:
        for raw in (parts(3), parts(2, 4), parts(5)):
            writer.append(raw)
        writer.commit({STEPS: 6}, {STEPS: 0})
        writer.seal()
        assert 2 == writer.num_records
    with Recording(tmp_path / "r") as recording:
        assert [1, 3, 2, 5] == [raw.position.offset for raw in recording.records()]
        assert 4 == recording.num_records
        assert recording.at(Position("steps", 0, 3)).offsets == (3,)


def test_a_replay_of_a_part_is_no_success(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing is said, and the exit status is 1."""
    (path,) = small.rglob("*.avro")
    path.write_bytes(path.read_bytes()[:-1])
    assert 1 == main(["replay", str(small), "--dry-run"])
    told = capsys.readouterr()
    assert "was cut" in told.err
    assert "records are missing in the recording: see the warnings" in told.err
    assert "8 records would be played" in told.out


def test_an_offset_in_two_files_of_a_partition_is_named(tmp_path: Path) -> None:
    """No log has two records at one place."""
    other = raw_of(factories.step_completed(), 1)
    record(tmp_path / "r", [*beats(range(3)), other])
    with Recording(tmp_path / "r") as recording, pytest.raises(DamagedError, match=r"@1 is there"):
        list(recording.records())
