"""Who may write a recording, and what is on disk when it is done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlstreams.streams.recording import Recording, RecordingError, RecordingWriter
from rlstreams.streams.recording.manifest import save
from tests.unit.recording.recordings import (
    manifest,
    positions_after,
    record,
    trajectories,
)

HOLD = """
import sys
from pathlib import Path
from rlstreams.streams.recording import RecordingWriter
from tests.unit.recording.recordings import manifest

with RecordingWriter(Path(sys.argv[1]), manifest()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    """Two would mix up each other's files; the folder is free when the first ends."""
    folder = tmp_path / "r"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as first:
        assert "held\n" == first.stdout.readline()
        told = re.escape(
            f"{folder} is being written by another `rlstreams record` (process {first.pid})"
        )
        with pytest.raises(RecordingError, match=told):
            RecordingWriter(folder, manifest())
        first.kill()
    with RecordingWriter(folder, manifest()) as second:
        assert second.is_resumed


def test_writers_of_one_process_are_two_as_well(tmp_path: Path) -> None:
    """The second is refused before it has changed anything; the first goes on."""
    raws = list(trajectories(8))
    with RecordingWriter(tmp_path / "r", manifest()) as writer:
        for raw in raws[:4]:
            writer.append(raw)
        with pytest.raises(RecordingError, match=rf"process {os.getpid()}\)"):
            RecordingWriter(tmp_path / "r", manifest())
        for raw in raws[4:]:
            writer.append(raw)
        writer.commit(positions_after(raws), {})
        writer.seal()
    with Recording(tmp_path / "r") as recording:
        assert raws == list(recording.records())
        assert [] == recording.problems


def test_a_folder_that_is_refused_stays_as_it_is(tmp_path: Path) -> None:
    """No lock is left in what is somebody else's, or sealed."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    record(tmp_path / "sealed", trajectories(2))
    for name in ("photos", "sealed"):
        before = sorted(os.listdir(tmp_path / name))
        with pytest.raises(RecordingError, match="name another folder"):
            RecordingWriter(tmp_path / name, manifest())
        assert before == sorted(os.listdir(tmp_path / name))
    assert ["000000.parquet", "manifest.json"] == before


def test_a_recorder_that_was_killed_at_its_beginning_is_gone_on_with(tmp_path: Path) -> None:
    """With its manifest written and no file yet."""
    folder = tmp_path / "r"
    folder.mkdir()
    save(manifest(), folder)
    (folder / ".manifest.json.tmp").write_text("{", encoding="utf-8")
    raws = record(folder, trajectories(4))
    with Recording(folder) as recording:
        assert raws == list(recording.records())
