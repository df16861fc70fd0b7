"""A run paused, and stopped from outside: by Ctrl-C, a hang-up, the death of `up` itself.

Its loss is of the user's own, and is edited meanwhile.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.log.topics import STEPS
from tests.e2e.command import CONFIG, UP_S, Started, Workspace
from tests.e2e.test_stalls import process_of
from tests.heavy.trainer.own_code import BOUNDS, PPO, write

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)

DRAIN_S = 60.0
CTRL_C_S = 240.0
# Each stop finds some left, however late it comes: three stops at night, one by day.
STEPS_OF_THREE, STEPS_OF_ONE = 30, 10
WORDS = (
    "--trainer.groups_per_step=4", "--prompts.evaluate_rows=16", "--demo.kills=[]",
    f"--deadlines.drain_s={DRAIN_S:g}", "--trainer.loss.kind=code/my_loss.py:loss",
)  # fmt: skip
HALVED = f"{BOUNDS.rstrip()} / 2\n"  # other weights in each step
# The first terminal that the leader of a session opens is its own. `nohup pytest` ignores SIGHUP.
ON_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execvp("rlstreams", ["rlstreams", "up", *sys.argv[1:]])
"""
QUIET_S = 4.0  # several steps' time
GONE_S = 60.0  # a fork server sees its parent's end a moment later


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How it ended, and who was left."""

    status: int
    output: str
    left: dict[int, str]
    seconds: float
    steps: int = STEPS_OF_THREE  # of the whole run


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("interrupted"))
    write(workspace.folder / "code", my_loss=PPO, bounds=BOUNDS)
    yield workspace
    workspace.close()


def control(workspace: Workspace, action: str) -> None:
    """What a person asks of all roles through the topic `control`."""
    done = workspace.run("rlstreams", "control", action, "runs/demo")
    assert 0 == done.returncode, done.stdout


def at_rest(started: Started) -> int:
    """The last step, once none has come for a while."""
    until_s = time.monotonic() + UP_S
    step, since_s = started.last_step, time.monotonic()
    while time.monotonic() < since_s + QUIET_S:
        assert time.monotonic() < until_s, f"steps go on:\n{started.output}"
        time.sleep(0.05)
        if step != (step := started.last_step):
            since_s = time.monotonic()
    return step


@pytest.fixture(scope="module")
def drained(workspace: Workspace) -> Stopped:
    """SIGINT after step 2, a pause, and another step."""
    started = workspace.start_up(*WORDS, "--steps", f"{STEPS_OF_THREE}")
    started.wait_for_step(1)
    control(workspace, "pause")
    paused_at = at_rest(started)
    control(workspace, "resume")
    started.wait_for_step(paused_at + 1)
    started.signal(signal.SIGINT)
    since_s = time.monotonic()
    status = started.ended_within(CTRL_C_S)
    seconds = time.monotonic() - since_s
    while (left := workspace.processes()) and time.monotonic() < since_s + seconds + GONE_S:
        time.sleep(0.05)
    return Stopped(status=status, output=started.output, left=left, seconds=seconds)


@pytest.fixture(scope="module")
def hung_up(workspace: Workspace, drained: Stopped) -> Stopped:
    """Resumed on a terminal, which is gone after a step; whoever ends the session says it again."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, CONFIG, *WORDS, "--steps", f"{STEPS_OF_THREE}",
         "--resume", "--no-live"],
        cwd=workspace.folder, env=workspace.environment, stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen, until_s = "", time.monotonic() + UP_S
    while "\nstep " not in seen:
        assert time.monotonic() < until_s, seen
        assert process.poll() is None, seen
        if select.select([ours], [], [], 1.0)[0]:
            with suppress(OSError):  # it has ended just now
                seen += os.read(ours, 4096).decode()
    os.close(ours)  # SIGHUP to the foreground: to `up`, and to all that it has in its session
    since_s = time.monotonic()
    time.sleep(0.5)
    process.send_signal(signal.SIGHUP)
    status = process.wait(CTRL_C_S)
    seconds = time.monotonic() - since_s
    while (left := workspace.processes()) and time.monotonic() < since_s + seconds + GONE_S:
        time.sleep(0.05)
    output = (workspace.folder / "runs/demo/logs/up.log").read_text("utf-8")
    return Stopped(status=status, output=output, left=left, seconds=seconds)


@pytest.fixture(scope="module")
def orphaned(workspace: Workspace) -> Stopped:
    """`up` killed after a step: only its children can end themselves. By `make test-long` this is
    the third stop of a run that is resumed, for tests run in the order of this file."""
    has_begun = (workspace.folder / "runs/demo").exists()
    steps = STEPS_OF_THREE if has_begun else STEPS_OF_ONE
    started = workspace.start_up(*WORDS, "--steps", f"{steps}", *["--resume"] * has_begun)
    started.wait_for_step(1)  # each drain has made a few, too
    started.signal(signal.SIGKILL)
    since_s = time.monotonic()
    status = started.ended_within(GONE_S)
    # The broker outlives whoever started it, so that `--resume` finds it.
    while (left := without_java(workspace)) and time.monotonic() < since_s + DRAIN_S + GONE_S:
        time.sleep(0.1)
    seconds = time.monotonic() - since_s
    return Stopped(status=status, output=started.output, left=left, seconds=seconds, steps=steps)


def without_java(workspace: Workspace) -> dict[int, str]:
    return {pid: name for pid, name in workspace.processes().items() if name != "java"}


@pytest.mark.slow
def test_ctrl_c_drains_and_says_how_to_go_on(drained: Stopped) -> None:
    """What was asked is done: status 0; the log is whole, and the way on is named."""
    assert 0 == drained.status
    assert "run demo: drained; --resume goes on" in drained.output
    assert "lost 0, trained twice 0" in drained.output
    assert "--resume" in drained.output.splitlines()[-4]  # before web, inspect and audit


@pytest.mark.slow
def test_ctrl_c_leaves_nobody_behind(drained: Stopped) -> None:
    assert {} == drained.left


@pytest.mark.slow
def test_a_terminal_that_hangs_up_ends_it_like_any_program(hung_up: Stopped) -> None:
    """Although it is told twice; nobody is left, and what was said is in a file."""
    assert 128 + signal.SIGHUP == hung_up.status
    assert "step " in hung_up.output
    assert {} == hung_up.left


def test_workers_end_themselves_when_up_is_killed(orphaned: Stopped, workspace: Workspace) -> None:
    """SIGKILL to `up`: its children notice by their pipe, drain and exit; the broker stays."""
    assert -signal.SIGKILL == orphaned.status
    assert {} == orphaned.left, f"left after {orphaned.seconds:.0f} s"
    assert ["java"] == list(workspace.processes().values())
    logs = workspace.folder / "runs/demo/logs"
    assert [] == [log.name for log in logs.glob("*.log") if "Traceback" in log.read_text("utf-8")]


def test_what_was_stopped_again_and_again_completes(
    orphaned: Stopped, workspace: Workspace
) -> None:
    """The last start ends as if nothing had been: every step once, every sample accounted for.

    It takes the loss as it was edited before it. That is broken then, and the trainer killed: the
    next one has the text from the log, and makes the same weights.
    """
    code, run = workspace.folder / "code", workspace.folder / "runs/demo"
    write(code, bounds=HALVED)
    started = workspace.start_up(*WORDS, "--steps", f"{orphaned.steps}", "--resume")
    started.wait_for_step(1)
    write(code, bounds="def clipped(")
    os.kill(process_of(workspace, "trainer-0"), signal.SIGKILL)
    assert 0 == started.ended_within(UP_S), started.output
    assert f" trained {orphaned.steps * 4 * 8}, " in started.output
    assert "; lost 0, trained twice 0 (read from the log)" in started.output
    assert orphaned.output.count("\nstep ") < orphaned.steps, "it was killed too late"
    assert (run / "report.html").is_file()
    redone = re.findall(r"^steps .* done again .*: (\d+) of (\d+) .* equal", started.output, re.M)
    assert redone, started.output
    assert [] == [one for one in redone if one[0] != one[1]]
    assert re.search(
        r"^held-out accuracy from 0\.\d\d \(version 0\) to 0\.\d\d", started.output, re.M
    )
    with open_run(run) as log:
        claims = [record.event for record in log.read_topic(STEPS)]
    texts = [
        c.code["trainer.loss.kind: bounds.py"] for c in claims if isinstance(c, TrainerStarted)
    ]
    assert [BOUNDS, HALVED, HALVED] == texts[-3:]
