"""What `up` prints when nobody is there to read it any more."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlstreams.up.live.screen import LiveInput
from rlstreams.up.supervisor.terminal import lasting
from tests.unit.report.test_live import live_input

ROOT = Path(__file__).parents[3]

# `up` in little: it watches, and at its end it tells. A line on standard input is a turn.
_UP = """
import sys
from pathlib import Path
from rlstreams.up.live.screen import LiveView
from rlstreams.up.supervisor.terminal import Interrupts, lasting
from rlstreams.up.supervisor.summary import show
from tests.processes.supervisor.test_output import step
with lasting(Path({log!r})):
    with LiveView() as view:
        with Interrupts() as interrupts:
            for number, _ in enumerate(sys.stdin):
                view.update(step(number))
    show("run demo: " + ("drained" if interrupts.drains else "complete"))
    print("seen", file=sys.stderr)
"""
# The first terminal that the leader of a session opens is its own: hung up, it signals us.
_LEAD = "import os; os.close(os.open(os.ttyname(1), os.O_RDWR))\n"
SECONDS = 60.0


def step(number: int) -> LiveInput:
    """The run after so many steps."""
    return live_input(num_steps=number, message="")


def started(
    log: Path, *, stdout: int, stderr: int, lead: str = "", unbuffered: str = ""
) -> subprocess.Popen[bytes]:
    code = lead + _UP.format(log=str(log))
    words = [sys.executable, "-c", code]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, cwd=ROOT,
        start_new_session=True, env={**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip


def turn(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def read_until(fd: int, what: bytes) -> None:
    seen, until_s = b"", time.monotonic() + SECONDS
    while what not in seen:
        assert select.select([fd], [], [], max(0.0, until_s - time.monotonic()))[0], seen
        seen += os.read(fd, 4096)


def told(log: Path) -> list[str]:
    first, *lines = log.read_text("utf-8").splitlines()
    assert "nobody reads on" in first
    return [" ".join(line.split()[:3]) for line in lines]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("is_stderr_too", [False, True])
def test_a_reader_that_leaves_does_not_end_the_run(
    tmp_path: Path, is_stderr_too: bool, unbuffered: str
) -> None:
    """`up | head`: it goes on to its end, and what it says from there on is in a file."""
    log = tmp_path / "logs/up.log"
    ours, theirs = os.pipe()
    stderr_fd = theirs if is_stderr_too else subprocess.PIPE
    process = started(log, stdout=theirs, stderr=stderr_fd, unbuffered=unbuffered)
    os.close(theirs)
    turn(process)
    turn(process)
    read_until(ours, b"step    1/")
    os.close(ours)
    turn(process)
    turn(process)
    _, stderr = process.communicate(timeout=SECONDS)
    assert 0 == process.returncode, stderr
    last = ["seen"] if is_stderr_too else []
    assert ["step 2/60 reward", "step 3/60 reward", "run demo: complete", *last] == told(log)
    assert (None if is_stderr_too else b"seen\n") == stderr


def test_a_terminal_that_hangs_up_takes_only_the_screen_with_it(tmp_path: Path) -> None:
    """The drain goes on; from there on there are plain lines, and no picture among them."""
    log = tmp_path / "logs/up.log"
    ours, theirs = pty.openpty()
    process = started(log, stdout=theirs, stderr=theirs, lead=_LEAD)
    os.close(theirs)
    turn(process)
    turn(process)
    read_until(ours, b"Ctrl-C")  # the last line of a screen
    read_until(ours, b"Ctrl-C")
    os.close(ours)
    time.sleep(0.2)
    turn(process)
    turn(process)
    process.communicate(timeout=SECONDS)
    assert 0 == process.returncode
    text = log.read_text("utf-8")
    assert "\x1b" not in text
    assert ["step 2/60 reward", "step 3/60 reward", "run demo: drained", "seen"] == told(log)


def test_a_file_that_cannot_be_written_either_is_no_end(tmp_path: Path) -> None:
    """Nothing is told then."""
    (tmp_path / "logs").write_text("")
    ours, theirs = os.pipe()
    os.close(ours)
    process = started(tmp_path / "logs/up.log", stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    turn(process)
    _, stderr = process.communicate(timeout=SECONDS)
    assert (0, b"seen\n") == (process.returncode, stderr)


def test_a_reader_that_is_slow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that does not block, as some parents leave it, refuses what does not fit now."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    text = "x" * 300_000  # more than a pipe holds
    taken: list[bytes] = []

    def read() -> None:
        time.sleep(0.1)
        taken.extend(iter(lambda: os.read(theirs, 65_536), b""))

    reader = threading.Thread(target=read)
    reader.start()
    with open(ours, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with lasting(tmp_path / "logs/up.log"):
            sys.stdout.write(f"{text}\n")
    reader.join(SECONDS)
    os.close(theirs)
    assert f"{text}\n".encode() == b"".join(taken)
    assert not (tmp_path / "logs").exists()
