"""A replay never takes another run's folder; nothing of it is touched before that is known."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.replay.fresh import fresh_run
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_lock import locked_run
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig, RunSection

NOWHERE = "127.0.0.1:9"  # nobody listens: what is refused before, is refused without a broker


def of_run(name: str, folder: Path, bootstrap: str = NOWHERE) -> RunConfig:
    config = RunConfig(run=RunSection(id=name, dir=str(folder)))
    return replace(config, broker=replace(config.broker, bootstrap=bootstrap))


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught, fresh_run(config):
        pytest.fail("taken")
    return str(caught.value)


def test_the_folder_of_another_run_is_not_taken(tmp_path: Path) -> None:
    """Its configuration would be written over."""
    file = tmp_path / "config.json"
    file.write_text(resolved_json(of_run("live", tmp_path)), encoding="utf-8")
    before = file.read_bytes()
    assert "is the folder of run 'live': " in refusal(of_run("live-replay", tmp_path))
    assert "of run 'live' on 127.0.0.1:9: " in refusal(of_run("live", tmp_path, "127.0.0.1:19"))
    assert "of run 'live' on 127.0.0.1:9: " in refusal(of_run("live", tmp_path, ""))
    assert [file] == list(tmp_path.iterdir())
    assert before == file.read_bytes()


def test_a_folder_whose_configuration_is_none_is_not_taken(tmp_path: Path) -> None:
    """A model's, for example."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    assert "is no configuration of a run" in refusal(of_run("r", tmp_path))


def test_a_folder_in_which_somebody_is_at_work_is_not_taken(tmp_path: Path) -> None:
    """`up` has not written its first record yet; or another replay."""
    with locked_run(tmp_path):
        told = refusal(of_run("r", tmp_path))
    assert f"in use by another `rlstreams up` or `replay` (process {os.getpid()})" in told


def test_the_folder_of_a_recording_or_of_checkpoints_is_not_taken(tmp_path: Path) -> None:
    """A broker's data would lie among its files."""
    manifest = tmp_path / "rec/manifest.json"
    manifest.parent.mkdir()
    manifest.write_text(json.dumps({"format": 1}), encoding="utf-8")
    assert f"{manifest.parent} is a recording: " in refusal(of_run("r", manifest.parent))
    manifest = tmp_path / "checkpoints/000001-00000003/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"weight_hash": "a1"}), encoding="utf-8")
    assert "is a folder of checkpoints: " in refusal(of_run("r", tmp_path / "checkpoints"))
    assert "is one checkpoint: " in refusal(of_run("r", manifest.parent))
