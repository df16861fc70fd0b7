"""Recordings that were cut, changed, mixed up or written by somebody else: one kind of error."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlstreams.__main__ import main
from rlstreams.streams.recording import (
    DamagedError,
    ForeignFileError,
    Recording,
    RecordingError,
    RecordingWriter,
)
from rlstreams.streams.recording.reader import verify
from tests import factories
from tests.late import Late
from tests.unit.recording.recordings import change_manifest, manifest, raw_of, record, trajectories

polars = Late("polars")


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three files of two records."""
    record(tmp_path / "r", [raw_of(factories.heartbeat(), n) for n in range(6)], each=2)
    return tmp_path / "r"


def offsets(folder: Path) -> list[int]:
    with Recording(folder) as recording:
        return [raw.position.offset for raw in recording.records()]


def cut(folder: Path) -> None:
    path = folder / "000001.parquet"
    path.write_bytes(path.read_bytes()[:-9])


def grown(folder: Path) -> None:
    with RecordingWriter(folder.parent / "again", manifest()) as writer:
        for number in range(30):
            writer.append(raw_of(factories.heartbeat(), number))
        writer.manifest = json_manifest_with_id(folder, writer)
        writer.commit({}, {})
        writer.append(raw_of(factories.heartbeat(), 99))
        writer.commit({}, {})
    shutil.copy(folder.parent / "again/000001.parquet", folder / "000001.parquet")


def json_manifest_with_id(folder: Path, writer: RecordingWriter) -> object:
    from dataclasses import replace

    with Recording(folder) as recording:
        return replace(writer.manifest, id=recording.manifest.id)


def moved(folder: Path) -> None:
    (folder / "000002.parquet").rename(folder / "000001.parquet")


def foreign(folder: Path) -> None:
    polars.DataFrame({"dog": [1], "age": [2]}).write_parquet(folder / "000001.parquet")


def of_another(folder: Path) -> None:
    other = folder.parent / "other"
    record(other, [raw_of(factories.heartbeat(), n) for n in range(6)], each=2)
    shutil.copy(other / "000001.parquet", folder / "000001.parquet")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "000001.parquet").unlink(), "is missing (2 records)"),
        (cut, "cannot be read: it was cut, or bytes were changed"),
        (grown, "when the recording was sealed"),
        (moved, "is 000002.parquet under another name"),
        (foreign, "a Parquet file with the columns dog, age"),
        (of_another, "is of another recording, of run 'r'; this one is of 'r'"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_named(three: Path, damage: object, message: str) -> None:
    """With what is wrong with it; what is left is read, and an unfinished one not continued."""
    damage(three)  # type: ignore[operator]
    with Recording(three) as recording:
        (problem, *_) = recording.problems
    assert str(three / "000001.parquet") in problem
    assert message in problem
    assert [0, 1] == offsets(three)[:2]
    assert problem == verify(three)[0]


def test_a_file_too_many_is_named(three: Path) -> None:
    shutil.copy(three / "000001.parquet", three / "000003.parquet")
    assert f"{three}/000003.parquet is no file of this recording" in verify(three)[0]
    assert [0, 1, 2, 3, 4, 5] == offsets(three)


def test_an_unfinished_recording_that_lacks_a_file_is_not_continued(tmp_path: Path) -> None:
    """Nobody knows what else is missing."""
    folder = tmp_path / "r"
    record(folder, [raw_of(factories.heartbeat(), n) for n in range(6)], each=2, seal=False)
    (folder / "000001.parquet").unlink()
    assert [0, 1, 4, 5] == offsets(folder)
    with pytest.raises(RecordingError, match=r"cannot be continued.*000001\.parquet is missing"):
        RecordingWriter(folder, manifest())


def test_a_changed_byte_is_found_wherever_it_is(three: Path) -> None:
    """In a page by its checksum as it is read, in a footer by the file's hash."""
    path = three / "000001.parquet"
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert str(path) in verify(three)[0], at
    values = pq.read_metadata(three / "000000.parquet").row_group(0).column(12)
    at = values.data_page_offset + values.total_compressed_size - 9  # within a page
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(DamagedError, match=r"000001\.parquet: bytes are missing or were changed"):
        offsets(three)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_damaged_it_is_one_kind_of_error(tmp_path: Path, seed: int) -> None:
    """Bytes of any file changed, cut off or overwritten; looking changes nothing."""
    rng = random.Random(seed)
    folder = tmp_path / "r"
    each = [raw_of(e, 10 * n) for n, e in enumerate(factories.one_of_each().values())]
    raws = record(folder, [*each, *trajectories(20, first=100)], each=12)
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for _ in range(6):
        path = rng.choice(sorted(whole))
        data = bytearray(whole[path])
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.choice([1, 30])):
            at = rng.randrange(len(data) or 1)
            data[at : at + 9] = rng.choice([b"\xff" * 9, bytes(9), rng.randbytes(1)])
        path.write_bytes(data)
        with suppress(RecordingError):
            assert verify(folder)
        with suppress(RecordingError), Recording(folder) as recording:
            list(recording.records())
            recording.at(raws[3].position)
        assert bytes(data) == path.read_bytes()
        path.write_bytes(whole[path])


def test_folders_of_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ForeignFileError, match="no recording"):
        Recording(tmp_path)
    record(tmp_path / "new", trajectories(1))
    change_manifest(tmp_path / "new", format=3)
    with pytest.raises(ForeignFileError, match="format 3, this release reads 2; a newer rlstreams"):
        Recording(tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/manifest.json").write_text(json.dumps({"format": 1, "run": "r"}))
    with pytest.raises(ForeignFileError, match=r"old is a recording of format 1.*Avro container"):
        Recording(tmp_path / "old")
    change_manifest(tmp_path / "new", format=2, run="other")
    with pytest.raises(DamagedError, match=r"manifest\.json: bytes were changed: its own hash"):
        Recording(tmp_path / "new")


def test_a_recording_whose_manifest_is_gone_is_still_listed_as_one(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is missing, and status 1; also among others."""
    (three / "manifest.json").unlink()
    for named in (three, three.parent):
        assert 1 == main(["record", "list", str(named)])
        said = capsys.readouterr().out
        assert f"{three} holds the files of a recording, but its manifest.json is missing" in said
