"""Files of a recording that cannot be read end in one kind of error, which names file and place."""

from __future__ import annotations

import random
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from rlstreams.schemas.varint import long_bytes
from rlstreams.streams.log.record import Position
from rlstreams.streams.recording import DamagedError, ForeignFileError, Recording, RecordingError
from rlstreams.streams.recording.container import MAGIC, ContainerReader, read_header
from rlstreams.streams.recording.verify import verify
from tests import factories
from tests.unit.recording.recordings import raw_of, record, trajectories


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One file with five blocks of two records."""
    raws = [raw_of(factories.heartbeat(), n) for n in range(10)]
    record(tmp_path / "r", raws, block=2)
    return tmp_path / "r"


def one_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.avro")
    return path


def change_index(folder: Path, text: str) -> None:
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute(text)
    db.commit()
    db.close()


def read_everything(folder: Path) -> None:
    """In each way that there is."""
    with Recording(folder) as recording:
        list(recording.records())
        for entry in recording.index.entries():
            recording.read(entry)
        for file in recording.files:
            recording.index.blocks(file.number)
        recording.index.trained()
        recording.index.time_span()
        recording.index.check()


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


Whole = dict[Path, bytes]  # each file of a recording


def put_back(folder: Path, whole: Whole, damaged: Path) -> None:
    """What a test damaged, and the index, which may have been made anew."""
    for path in {damaged, folder / "index.sqlite"}:
        path.write_bytes(whole[path])


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Whole]:
    """A recording with each event, and its files as they should be."""
    folder = tmp_path_factory.mktemp("everything") / "r"
    each = [raw_of(e, 10 * n) for n, e in enumerate(factories.one_of_each().values())]
    record(folder, [*each, *trajectories(20, first=100)], block=4)
    return folder, {path: path.read_bytes() for path in files_of(folder)}


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_damaged_it_is_one_kind_of_error(
    everything: tuple[Path, Whole], seed: int
) -> None:
    """Bytes of any file changed, cut off or overwritten; with its index or without."""
    rng = random.Random(seed)
    folder, whole = everything
    for _ in range(6):
        files = sorted(whole)
        path = rng.choice([folder / "index.sqlite", rng.choice(files)])
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        if rng.random() < 0.2:
            del data[at:]
        for _ in range(rng.choice([1, 30])):
            at = rng.randrange(len(data) or 1)
            data[at : at + 9] = rng.choice([b"\xff" * 9, bytes(9), rng.randbytes(1)])
        path.write_bytes(data)
        if rng.random() < 0.2:
            (folder / "index.sqlite").unlink()
        for look in (read_everything, verify):
            with suppress(RecordingError):
                look(folder)
        put_back(folder, whole, path)
    assert whole == {path: path.read_bytes() for path in files_of(folder)}, "looking changed it"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("UPDATE records SET timestamp_ms = 'soon'", r"index\.sqlite.*no row of an index"),
        ("UPDATE records SET group_id = CAST(x'ff' AS TEXT)", r"index\.sqlite cannot be read"),
        ("UPDATE records SET block_at = -7", r"steps/.*byte -7"),
        ("UPDATE records SET place = -1", r"the index does not fit to steps\[0\]@0"),
        ("UPDATE records SET block_at = block_at + 3", r"steps/.*block at byte \d+"),
    ],
)
def test_an_index_that_was_changed_is_named(small: Path, change: str, told: str) -> None:
    """And how to get another."""
    change_index(small, change)
    with Recording(small) as recording, pytest.raises(DamagedError, match=told) as caught:
        recording.at(Position("steps", 0, 0))
    if "cannot be read" in told:
        assert "remove it: it is made anew from the container files" in str(caught.value)


def test_an_index_whose_tables_cannot_be_read_is_made_anew(small: Path) -> None:
    """Where it only shows behind the first table."""
    change_index(small, "UPDATE files SET size_bytes = 'many'")
    with Recording(small) as recording:
        assert 10 == len(list(recording.records()))
        assert "made anew" in recording.problems[-1]


def test_a_block_that_claims_to_be_enormous_is_damaged(small: Path) -> None:
    """A frame's own header is under no checksum; nobody reserves an exabyte for it."""
    path = one_file(small)
    with path.open("rb") as file:
        header = read_header(file, "x")
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0100]) + (1 << 60).to_bytes(8, "little")
    assert 1 << 60 == zstandard.frame_content_size(frame + bytes(8))
    block = long_bytes(2) + long_bytes(len(frame) + 8) + frame + bytes(8) + header.sync
    path.write_bytes(path.read_bytes()[: header.size_bytes] + block)
    reader = ContainerReader(path)
    with pytest.raises(DamagedError, match=f"block at byte {header.size_bytes}"):
        reader.block(header.size_bytes)
    reader.close()


def test_a_header_that_claims_to_be_enormous_is_damaged(tmp_path: Path) -> None:
    """A long file is not read whole in search of its end."""
    path = tmp_path / "x.avro"
    path.write_bytes(MAGIC + long_bytes(1) + long_bytes(1 << 40) + bytes(40_000_000))
    with pytest.raises(DamagedError, match=r"x\.avro: its header is damaged.*16 MiB"):
        ContainerReader(path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"zstandard", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff", "its header is damaged"),
        (b'"name":"epoch"', b'"name":"apoch"', "its schema is not the one of its fingerprint"),
        (b"rlstreams.run\x02r", b"rlstreams.run\x02q", "is of run 'q', the recording of 'r'"),
        (b"rlstreams.run\x02r", b"rlstreams.run\x02\xff", "is of run '\ufffd', the recording of"),
    ],
)
def test_a_header_that_was_changed_is_named(small: Path, old: bytes, new: bytes, told: str) -> None:
    """Events that no longer decode are not taken for records that never were events."""
    path = one_file(small)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with Recording(small) as recording:
        assert [] == list(recording.records())
        (problem,) = recording.problems
    assert path.name in problem
    assert told in problem
    assert "(10 records)" in problem


def test_a_file_where_a_recording_is_expected_is_named(tmp_path: Path) -> None:
    """And a manifest that nests without end."""
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ForeignFileError, match="file is a file; a recording is a folder with"):
        Recording(tmp_path / "file")
    (tmp_path / "manifest.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        Recording(tmp_path)


def test_a_name_that_cannot_be_one_is_named(small: Path) -> None:
    """A changed byte of the index may be a zero."""
    change_index(small, "UPDATE files SET topic = 'ste' || char(0) || 'ps'")
    with Recording(small) as recording:
        assert "is missing: 10 records" in recording.problems[0]
        with pytest.raises(DamagedError, match="cannot be read at byte 0"):
            list(recording.file_records(recording.index.files()[0]))


@pytest.mark.parametrize("old", [b'"items"', b'"values"', b'"type":"record"'])
def test_a_schema_that_lacks_a_word_is_named(tmp_path: Path, old: bytes) -> None:
    """A parser of schemas has errors of its own."""
    record(tmp_path / "r", [raw_of(factories.step_completed(), 0)])
    path = one_file(tmp_path / "r")
    data = path.read_bytes()
    at = data.index(old, 1200)
    path.write_bytes(data[: at + 1] + b"x" + data[at + 2 :])
    with Recording(tmp_path / "r") as recording:
        assert [] == list(recording.records())
        assert "its schema is not the one of its fingerprint" in recording.problems[0]
