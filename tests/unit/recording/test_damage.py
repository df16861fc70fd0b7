"""Recordings that were cut, changed, mixed up or written by somebody else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fastavro
import pytest

from rlstreams.__main__ import main
from rlstreams.streams.recording import DamagedError, ForeignFileError, Recording
from rlstreams.streams.recording.container import ContainerReader
from rlstreams.streams.recording.manifest import save
from rlstreams.streams.recording.verify import verify
from tests import factories
from tests.unit.recording.recordings import (
    change_manifest,
    manifest,
    raw_of,
    record,
    trajectories,
)


def one_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.avro")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One file with five blocks of two records."""
    record(
        tmp_path / "r", [raw_of(factories.heartbeat(), n) for n in range(10)], seal=True, block=2
    )
    return tmp_path / "r"


def test_a_recording_cut_at_any_byte_opens_to_its_last_whole_block(small: Path) -> None:
    """And says how many records are missing, and from where on."""
    path = one_file(small)
    data = path.read_bytes()
    reader = ContainerReader(path)
    ends = [block.end for block in reader.blocks()]
    header = reader.header.size_bytes
    reader.close()
    for size in [*range(0, header, 97), *range(header, len(data), 3), *ends[:-1]]:
        path.write_bytes(data[:size])
        whole = 2 * sum(end <= size for end in ends)
        with Recording(small) as recording:
            assert list(range(whole)) == [r.position.offset for r in recording.records()]
            text = " ".join(recording.problems)
        assert f"ends at byte {size}" in text
        if size >= header:
            assert f"{10 - whole} records of 10 are missing, from steps[0]@{whole} on" in text


def test_a_changed_byte_is_found_wherever_it_is(small: Path) -> None:
    """The file is named, and the block with the records that it held."""
    path = one_file(small)
    data = path.read_bytes()
    reader = ContainerReader(path)
    header = reader.header.size_bytes
    blocks = [(block.at, block.end) for block in reader.blocks()]
    reader.close()
    for at in [*range(0, header, 97), *range(header, len(data), 5), *(b - 1 for b, _ in blocks)]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        problems = verify(small).problems
        assert problems, at
        assert path.name in problems[0], problems
        if at >= header:
            number = next(n for n, (begin, end) in enumerate(blocks) if begin <= at < end)
            assert f"in the block at byte {blocks[number][0]}" in problems[0], (at, problems)
            held = f"it held 2 records, steps[0]@{2 * number} to {2 * number + 1}"
            assert held in problems[0], (at, problems)


def test_reading_raises_at_a_changed_block_or_passes_it_by_if_asked(small: Path) -> None:
    """Nobody trains on less than there was without being told."""
    path = one_file(small)
    reader = ContainerReader(path)
    third = [block.at for block in reader.blocks()][2]
    reader.close()
    data = bytearray(path.read_bytes())
    data[third + 8] ^= 1
    path.write_bytes(data)

    with Recording(small) as recording, pytest.raises(DamagedError, match=r"@4 to 5"):
        list(recording.records())
    seen: list[DamagedError] = []
    with Recording(small, on_damage=seen.append) as recording:
        assert [0, 1, 2, 3, 6, 7, 8, 9] == [r.position.offset for r in recording.records()]
    assert 1 == len(seen)


def test_without_an_index_one_is_made_from_the_files(tmp_path: Path) -> None:
    """The container files alone are the recording."""
    raws = record(tmp_path / "r", trajectories(50), block=10)
    (tmp_path / "r" / "index.sqlite").unlink()

    with Recording(tmp_path / "r") as recording:
        assert raws == list(recording.records())
        assert raws[17] == recording.at(raws[17].position)
        assert "index.sqlite" in recording.problems[0]
    assert not (tmp_path / "r" / "index.sqlite").exists()


def test_a_changed_index_or_manifest_is_named(small: Path) -> None:
    """Every file of a recording is covered by a hash."""
    index = small / "index.sqlite"
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data)
    assert "index.sqlite: bytes were changed" in " ".join(verify(small).problems)

    change_manifest(small, run="other")
    assert "manifest.json: bytes were changed" in verify(small).problems[0]


def test_a_missing_file_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    """With how many records it held."""
    raws = record(tmp_path / "r", trajectories(10))
    next((tmp_path / "r").rglob("1-*.avro")).unlink()

    with Recording(tmp_path / "r") as recording:
        expected = [raw for raw in raws if raw.position.partition == 0]
        assert expected == list(recording.records())
        assert "is missing: 5 records" in recording.problems[0]
    assert "is missing: 5 records" in verify(tmp_path / "r").problems[0]


def test_other_files_and_newer_formats_are_refused_by_name(tmp_path: Path) -> None:
    """With what is there instead."""
    with pytest.raises(ForeignFileError, match="no recording"):
        Recording(tmp_path)

    record(tmp_path / "new", trajectories(1))
    change_manifest(tmp_path / "new", format=2)
    with pytest.raises(ForeignFileError, match="format 2, this release reads 1"):
        Recording(tmp_path / "new")


@pytest.mark.parametrize(
    ("codec", "problem"),
    [("deflate", "codec 'deflate'; this reads 'zstandard'"), ("zstandard", "Avro file of 'Dog'")],
)
def test_a_foreign_avro_file_in_its_place_is_named(
    tmp_path: Path, codec: str, problem: str
) -> None:
    """Another codec, another schema."""
    record(tmp_path / "r", trajectories(2))
    path = next((tmp_path / "r").rglob("1-*.avro"))
    dog = {"type": "record", "name": "Dog", "fields": [{"name": "age", "type": "long"}]}
    with path.open("wb") as file:
        fastavro.writer(file, dog, [{"age": n} for n in range(3000)], codec=codec)

    assert problem in " ".join(verify(tmp_path / "r").problems)


def test_a_recording_whose_manifest_is_gone_is_still_listed_as_one(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is missing, and status 1; also among others."""
    (small / "manifest.json").unlink()
    for named in (small, small.parent):
        assert 1 == main(["recordings", str(named)])
        said = capsys.readouterr().out
        assert f"{small} holds the files of a recording, but its manifest.json is missing" in said


def test_events_of_a_newer_release_are_read_as_far_as_we_know_them(tmp_path: Path) -> None:
    """Their schema is in the file: a field of theirs is passed by."""
    record(tmp_path / "r", [raw_of(factories.heartbeat(detail="d"), 0)])
    path = one_file(tmp_path / "r")
    newer = _with_a_new_field(path)
    target = path.with_name(newer)
    shutil.move(path, target)
    (tmp_path / "r" / "index.sqlite").unlink()
    save(manifest(), tmp_path / "r")

    with Recording(tmp_path / "r") as recording:
        (raw,) = recording.records()
        event = recording.decoded(raw).event

    assert factories.heartbeat(detail="d") == event


def _with_a_new_field(path: Path) -> str:
    """Rewrite a file of heartbeats as a later release would write it; its new name."""
    from rlstreams.schemas import fingerprint

    with path.open("rb") as file:
        reader = fastavro.reader(file, return_record_name=True)
        schema, metadata = reader.writer_schema, dict(reader.metadata)
        records = list(reader)
    plain = json.loads(metadata["avro.schema"])
    event = next(f["type"] for f in plain["fields"] if f["name"] == "event")
    event["fields"].append({"name": "mood", "type": "string", "default": ""})
    print_ = fingerprint(json.dumps(event)).hex()
    for record_ in records:
        record_["event"]["mood"] = "fine"
        record_["event_bytes"] += 5
    ours = {k: v for k, v in metadata.items() if k.startswith("rlstreams.")}
    ours["rlstreams.fingerprint"] = print_
    with path.open("wb") as file:
        fastavro.writer(file, plain, records, codec="zstandard", metadata=ours)
    assert schema
    return f"0-TrainerHeartbeat-{print_}.avro"
