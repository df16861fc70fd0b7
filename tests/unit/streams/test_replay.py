"""The Python API: what lies in a folder is found out, and read with types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlstreams.schemas import StepCompleted
from rlstreams.streams.lineage.replay import hops, lineage, open_log
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_folder import RunFolder
from tests.unit.inspect import told_run


def test_a_recording_is_opened_by_its_folder(tmp_path: Path) -> None:
    """Typed records, and the lineage of a sample."""
    folder = told_run.recorded(tmp_path / "r", told_run.memory_bus())
    with open_log(folder) as log:
        assert [1, 2, 3] == [record.event.step for record in log.read(StepCompleted)]
        assert "trained" == lineage(log, "1/0").outcome
        assert hops(lineage(log, "1/0"))
        assert () == log.problems


def test_what_a_recording_lacks_is_told(tmp_path: Path) -> None:
    """A file that was removed."""
    folder = told_run.recorded(tmp_path / "r", told_run.memory_bus())
    (missing,) = folder.glob("*.parquet")
    missing.unlink()
    with open_log(folder) as log:
        assert [] == list(log.read(StepCompleted))
        (problem,) = log.problems
    assert missing.name in problem


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    """With what makes it one of the two."""
    with (
        pytest.raises(ConfigError, match=r"it has neither config\.json nor manifest\.json"),
        open_log(tmp_path),
    ):
        pass


def test_a_run_folder_says_where_its_log_is(tmp_path: Path) -> None:
    """As `up` left it; secrets stay names."""
    broker = {
        "bootstrap": "",
        "options": {"sasl.password": "env:PW"},
        "jars_dir": "",
        "heap_mb": 256,
    }
    config = {"run": {"id": "r1"}, "broker": broker}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    folder = RunFolder.load(tmp_path)
    assert ("r1", "", "env:PW") == (folder.run, folder.bootstrap, folder.options["sasl.password"])


@pytest.mark.parametrize("text", ["{", "[]", '{"run": {}}', '{"run": 3, "broker": 4}'])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """The file is named."""
    (tmp_path / "config.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is no configuration of a run"):
        RunFolder.load(tmp_path)


def test_a_run_without_a_broker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started in a folder where no broker ever ran."""
    monkeypatch.delenv("PW", raising=False)
    broker = {"bootstrap": "", "options": {}, "jars_dir": "", "heap_mb": 256}
    text = json.dumps({"run": {"id": "r1"}, "broker": broker})
    (tmp_path / "config.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="none ever ran in"), open_log(tmp_path):
        pass
    assert ["config.json"] == [path.name for path in tmp_path.iterdir()]
