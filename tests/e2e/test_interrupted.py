"""A run that is stopped from outside: by Ctrl-C, and by the death of `up` itself."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.command import CONFIG, Workspace

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)

DRAIN_S = 60.0
CTRL_C_S = 240.0
WORDS = (
    "--steps", "8", "--trainer.groups_per_step=4", "--prompts.evaluate_rows=16", "--demo.kills=[]",
    f"--deadlines.drain_s={DRAIN_S:g}",
)  # fmt: skip
GONE_S = 60.0  # a fork server sees its parent's end a moment later


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How it ended, and who was left."""

    status: int
    output: str
    left: dict[int, str]
    seconds: float


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("interrupted"))
    yield workspace
    workspace.close()


@pytest.fixture(scope="module")
def drained(workspace: Workspace) -> Stopped:
    """SIGINT after step 2."""
    started = workspace.start_up(*WORDS)
    started.wait_for_step(2)
    started.signal(signal.SIGINT)
    since_s = time.monotonic()
    status = started.ended_within(CTRL_C_S)
    seconds = time.monotonic() - since_s
    while (left := workspace.processes()) and time.monotonic() < since_s + seconds + GONE_S:
        time.sleep(0.05)
    return Stopped(status=status, output=started.output, left=left, seconds=seconds)


@pytest.fixture(scope="module")
def orphaned(workspace: Workspace, drained: Stopped) -> Stopped:
    """Resumed, and `up` killed after step 4: only its children can end themselves."""
    started = workspace.start_up(*WORDS, "--resume")
    started.wait_for_step(4)
    started.signal(signal.SIGKILL)
    since_s = time.monotonic()
    status = started.ended_within(GONE_S)
    # The broker outlives whoever started it, so that `--resume` finds it.
    while (left := without_java(workspace)) and time.monotonic() < since_s + DRAIN_S + GONE_S:
        time.sleep(0.1)
    seconds = time.monotonic() - since_s
    return Stopped(status=status, output=started.output, left=left, seconds=seconds)


def without_java(workspace: Workspace) -> dict[int, str]:
    return {pid: name for pid, name in workspace.processes().items() if name != "java"}


def test_ctrl_c_drains_and_says_how_to_go_on(drained: Stopped) -> None:
    """Status 1, for what was asked is not done; the log is whole, and the way on is named."""
    assert 1 == drained.status
    assert "run demo: drained" in drained.output
    assert "lost 0, trained twice 0" in drained.output
    assert "--resume" in drained.output.splitlines()[-3]


def test_ctrl_c_leaves_nobody_behind(drained: Stopped) -> None:
    """No worker, no fork server, no broker."""
    assert {} == drained.left


def test_workers_end_themselves_when_up_is_killed(orphaned: Stopped, workspace: Workspace) -> None:
    """SIGKILL to `up`: its children notice by their pipe, drain and exit; the broker stays."""
    assert -signal.SIGKILL == orphaned.status
    assert {} == orphaned.left, f"left after {orphaned.seconds:.0f} s"
    assert ["java"] == list(workspace.processes().values())
    logs = workspace.folder / "runs/demo/logs"
    assert [] == [log.name for log in logs.glob("*.log") if "Traceback" in log.read_text("utf-8")]


def test_what_was_stopped_twice_completes(orphaned: Stopped, workspace: Workspace) -> None:
    """The third start ends as if nothing had been: every step once, every sample accounted for."""
    done = workspace.up(*WORDS, "--resume")
    assert 0 == done.returncode, done.stdout
    audited = workspace.run("sh", "-c", f"rlstreams audit {CONFIG} --json 2>audit.err")
    assert 0 == audited.returncode, audited.stdout
    report = json.loads(audited.stdout)
    assert (8, 8 * 4 * 8, 0) == (report["steps"], report["trained"], report["lost"])
    assert Path(workspace.folder / "runs/demo/report.html").is_file()
