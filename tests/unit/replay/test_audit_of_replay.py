"""The audit takes a recording, and refuses the run that a replay of it wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rlstreams.cli.audit import run as audit_command
from rlstreams.debug.replay.player import Player
from rlstreams.streams.audit.auditor import ReplayedError, audit
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Position
from rlstreams.streams.memory.bus import MemoryBus
from rlstreams.streams.recording import Manifest, RecordedTopic, Recording, RecordingWriter
from rlstreams.streams.recording.recorder import ORDER, Recorder
from rlstreams.streams.recording.selection import Selection
from tests.logs import made_log
from tests.unit.streams.audit_run import NUM_GROUPS, SIZE, Run


def recorded(folder: Path, selection: dict[str, str] | None = None) -> Path:
    """A run of which group 0 was trained, recorded."""
    run = Run()
    run.issue()
    run.roll_out()
    scored = [run.score_some([number])[0] for number in range(NUM_GROUPS * SIZE)]
    run.train(0, [Position(*at) for at in scored])
    names = [topic.name for topic in ORDER]
    ids = run.bus.topic_ids(names)
    topics = {n: RecordedTopic(id=ids[n], partitions=run.bus.partitions(n)) for n in names}
    manifest = Manifest(run="demo", started_at_ms=1, topics=topics, selection=selection or {})
    with RecordingWriter(folder, manifest) as writer:
        with Recorder(run.bus, writer, Selection()) as recorder:
            recorder.up_to_now()
        writer.seal()
    return folder


def audited(folder: Path) -> int:
    options = {"follow": False, "every": 0.0, "settle": 0.0, "json": False, "bootstrap": None}
    return audit_command(argparse.Namespace(config=[str(folder)], overrides=[], **options))


def test_a_recording_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the positions of the log that it was recorded from."""
    assert audited(recorded(tmp_path / "rec")) == 0
    assert "ok: every sample accounted for" in capsys.readouterr().out


def test_a_recording_of_a_part_is_refused(tmp_path: Path) -> None:
    """With what was chosen: what is not there may be anywhere."""
    with pytest.raises(ConfigError, match=r"holds a part of its run \(2:3\)"):
        audited(recorded(tmp_path / "rec", {"steps": "2:3"}))


def test_a_replay_is_refused(tmp_path: Path) -> None:
    """Its records lie elsewhere than its steps say."""
    bus = MemoryBus(made_log("again", 2), "again")
    with Recording(recorded(tmp_path / "rec")) as recording:
        Player(bus, "demo").play(recording.records())
    with pytest.raises(ReplayedError, match="audit the recording"):
        audit(bus, settle_s=0)
