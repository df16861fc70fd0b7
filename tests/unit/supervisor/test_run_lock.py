"""Two `up` on one folder would share a broker, and the first to end would stop it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_lock import LOCK_FILE, locked_run
from rlstreams.up.supervisor import up
from rlstreams.up.supervisor.fault_hook import UpOptions
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig, RunSection


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    """The second is told who holds it; afterwards the folder is free."""
    told = rf"in use by another .*process {os.getpid()}\)"
    with locked_run(tmp_path), pytest.raises(ConfigError, match=told), locked_run(tmp_path):
        pytest.fail("held twice")
    with locked_run(tmp_path):
        pass


@pytest.mark.parametrize(
    ("run_id", "told"), [("run", r"in use by another .*process \d+\)"), ("new", "of run 'run'")]
)
def test_a_folder_that_is_taken_is_told_before_the_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_id: str, told: str
) -> None:
    """Model, data and verifier are looked at for seconds."""
    run = RunConfig(run=RunSection(id="run", dir=str(tmp_path)))
    (tmp_path / "config.json").write_text(resolved_json(run))
    wanted = RunConfig(run=RunSection(id=run_id, dir=str(tmp_path)))
    options = UpOptions(config=wanted, command="up", is_resumed=True, is_live=False)
    monkeypatch.setattr(up, "preflight", lambda *_: pytest.fail("checked"))
    with locked_run(tmp_path), pytest.raises(ConfigError, match=told):
        up.up(options)


def test_a_folder_that_cannot_be_written_is_named_with_its_field() -> None:
    """No file can be made below /proc, by root either."""
    folder = Path("/proc/self")
    told = r"^run\.dir: /proc/self cannot be written \("
    with pytest.raises(ConfigError, match=told), locked_run(folder):
        pytest.fail("held")


def test_a_folder_that_cannot_be_made_is_named_with_its_field(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    config = RunConfig(run=RunSection(id="one", dir=str(file / "run")))
    before = os.umask(0o022)
    try:
        with (
            pytest.raises(ConfigError, match=rf"^run\.dir: {file}/run cannot be made \("),
            up._folder(config),
        ):
            pytest.fail("made")
    finally:
        os.umask(before)


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    """Logs, checkpoints and weights: roles inherit the mask under which `up` holds the folder."""
    before = os.umask(0o022)
    try:
        with up._folder(RunConfig(run=RunSection(id="one", dir=str(tmp_path / "run")))) as (
            folder,
            _,
        ):
            (folder / "weights").write_bytes(b"")
            (folder / "checkpoints").mkdir()
        modes = {p.name: p.stat().st_mode & 0o777 for p in (folder, *folder.iterdir())}
    finally:
        os.umask(before)
    assert (0o600, 0o700, 0o700) == (modes["weights"], modes["checkpoints"], modes["run"])


def test_a_folder_that_was_deleted_is_told_from_one_made_anew(tmp_path: Path) -> None:
    """A broker that starts again makes its folder: that is not the run's any more."""
    folder = tmp_path / "run"
    folder.mkdir()
    with locked_run(folder) as is_there:
        assert is_there()
        shutil.rmtree(folder)
        assert not is_there()
        (folder / "broker").mkdir(parents=True)
        (folder / LOCK_FILE).touch()
        assert not is_there()
