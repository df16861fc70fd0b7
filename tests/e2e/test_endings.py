"""The exit status of `up`, as the table in infra/docs/operating.md has it, by real endings."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.command import ROOT, UP_S, Started, Workspace, needs_mount, small_disk
from tests.e2e.test_interrupted import WORDS, control

END_S = 240.0
PAGE = ROOT / "infra/docs/operating.md"
NO_ROOM = "No space left on device"
pytestmark = pytest.mark.slow
FULL = (*WORDS, "--steps", "5000", "--no-live", "--trainer.checkpoint_every=2")


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    workspace.close()


def documented() -> set[str]:
    """The first column of the table under `up`."""
    (table,) = re.findall(r"\| `up` ended with .*?\n\n", PAGE.read_text("utf-8"), re.DOTALL)
    return {row.split("|")[1].strip() for row in table.splitlines()[2:] if row}


def gone(workspace: Workspace) -> dict[int, str]:
    """Who is left, a moment after the end."""
    until_s = time.monotonic() + 90.0  # a fork server imports torch before it looks up
    while (left := workspace.processes()) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def serves(folder: Path) -> bool:
    """Whether the broker is being started, and no role yet."""
    return (folder / "broker").exists()


def works(folder: Path) -> bool:
    """Whether roles are being started."""
    return any((folder / "logs").glob("rollout-*.log"))


@pytest.mark.parametrize(("number", "moment"), [(signal.SIGINT, serves), (signal.SIGTERM, works)])
def test_ended_as_asked(
    workspace: Workspace, number: signal.Signals, moment: Callable[[Path], bool]
) -> None:
    """Before the roles run the signal alone ends it; from then on it drains. Nobody is left."""
    started = workspace.start_up(*WORDS, "--steps", "5000", "--no-live")
    until_s = time.monotonic() + UP_S
    while not moment(workspace.folder / "runs/demo"):
        assert started.process.poll() is None, started.output
        assert time.monotonic() < until_s, started.output
        time.sleep(0.01)
    started.signal(number)
    status = started.ended_within(END_S)
    if "run demo: drained; --resume goes on" in started.output:
        assert 0 == status, started.output
        assert "lost 0, trained twice 0" in started.output
    else:
        assert status in (-number, 128 + number), started.output
    assert {} == gone(workspace)
    assert {"0", "1", "78", "128 + signal"} == documented()


def wait_for(started_output: Path, words: str, limit_s: float = 400.0) -> None:
    until_s = time.monotonic() + limit_s
    while words not in (text := started_output.read_text("utf-8")):
        assert time.monotonic() < until_s, text
        time.sleep(0.1)


@needs_mount
def test_a_trainer_on_a_full_disk_waits_for_room(workspace: Workspace) -> None:
    """With the cause, and not in a loop; with room again the run goes on, until it is drained by
    its topic."""
    checkpoints = workspace.folder / "runs/demo/checkpoints"
    with small_disk(checkpoints, "600k"):
        started = workspace.start_up(*FULL)
        wait_for(started.log, "waiting for room on the disk under ")
        (line,) = re.findall(r"^\[.*trainer-0 failed.*$", started.output, re.MULTILINE)[:1]
        assert NO_ROOM in line
        subprocess.run(["mount", "-o", "remount,size=60m", str(checkpoints)], check=True)
        started.wait_for_step(started.last_step + 2)
        control(workspace, "drain")
        assert 0 == started.ended_within(END_S), started.output
        assert "run demo: drained; --resume goes on" in started.output
        assert "lost 0, trained twice 0" in started.output
    assert {} == gone(workspace)


@contextmanager
def run_on_full_disk(workspace: Workspace, stall_s: int) -> Iterator[Started]:
    """A run whose folder lies on a disk that is full after two steps; nobody is left of it."""
    folder = workspace.folder / "full"
    with small_disk(folder, "40m"):
        words = (*FULL, f"--run.dir={folder}/run", f"--deadlines.stall_s={stall_s}")
        started = workspace.start_up(*words)
        started.wait_for_step(2)
        fill = ["dd", "if=/dev/zero", f"of={folder}/filler", "bs=64k"]
        subprocess.run(fill, check=False, capture_output=True)  # until it fails
        yield started
        assert {} == gone(workspace)


@needs_mount
def test_a_disk_that_stays_full_ends_the_run_with_its_sentence(workspace: Workspace) -> None:
    """The end names the disk, the way on, and leaves nobody behind."""
    with run_on_full_disk(workspace, stall_s=10) as started:
        assert 1 == started.ended_within(END_S), started.output
        assert NO_ROOM in started.output or "is full" in started.output
        assert "nothing that was committed is lost" in started.output
        assert "--resume" in started.output


@needs_mount
def test_sigterm_on_a_full_disk_leaves_no_broker_behind(workspace: Workspace) -> None:
    """Within the deadlines of a drain, whatever could be written."""
    with run_on_full_disk(workspace, stall_s=600) as started:
        wait_for(started.log, "for room")  # the broker, or the trainer, if a checkpoint came first
        started.signal(signal.SIGTERM)
        started.ended_within(300.0)
