"""What `up` prints: its reader is never waited for, and the log file has every line."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from rlstreams.up.live.screen import LiveInput
from tests.unit.report.test_live import live_input

ROOT = Path(__file__).parents[3]

# `up` in little: it watches, and at its end it tells. A line on standard input is a turn.
_UP = """
import sys
from pathlib import Path
from rlstreams.up.live.output import output_to
from rlstreams.up.live.screen import LiveView
from rlstreams.up.supervisor.summary import show
from tests.processes.supervisor.test_output import step
with output_to(Path({log!r})):
    with LiveView() as view:
        for number, _ in enumerate(sys.stdin):
            view.update(step(number))
            sys.stderr.write(f"{{number}}.")
            sys.stderr.flush()
    show("run demo: complete")
"""
SECONDS = 60.0
NUM_MANY = 40  # turns whose lines are more than a pipe holds


def step(number: int) -> LiveInput:
    """Something was said."""
    return live_input(num_steps=1, message=f"turn {number} {'x' * 3000}")


def started(log: Path, stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _UP.format(log=str(log))], stdin=subprocess.PIPE, stdout=stdout,
        stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip


@pytest.fixture(params=["pipe", "terminal"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """The reader's end, and ours."""
    ours, theirs = os.pipe() if request.param == "pipe" else pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_a_reader_that_reads_nothing_holds_nobody_up(tmp_path: Path, ends: tuple[int, int]) -> None:
    """Ctrl-S, or `| less`: every turn comes round, and the end too; the file has all lines."""
    log = tmp_path / "logs/up.log"
    process = started(log, ends[1])
    os.close(ends[1])
    _, stderr = process.communicate(b"\n" * NUM_MANY, timeout=SECONDS)
    assert 0 == process.returncode, stderr
    assert stderr.endswith(f"{NUM_MANY - 1}.".encode())
    text = log.read_text("utf-8")
    assert "\x1b" not in text
    lines = text.splitlines()
    assert "run demo: complete" == lines[-1]
    assert NUM_MANY == sum("] turn " in line for line in lines)


def test_a_reader_that_leaves_ends_up_as_it_ends_any_program(tmp_path: Path) -> None:
    """`up | head`: the next line but one ends it, by unwinding; the file says how far it came."""
    log = tmp_path / "logs/up.log"
    ours, theirs = os.pipe()
    process = started(log, theirs)
    os.close(theirs)
    os.close(ours)
    assert process.stdin is not None
    until_s = time.monotonic() + SECONDS
    with suppress(BrokenPipeError):
        while process.poll() is None:
            assert time.monotonic() < until_s
            process.stdin.write(b"\n")
            process.stdin.flush()
            time.sleep(0.02)
    with suppress(BrokenPipeError):
        process.stdin.close()
    with process.stderr or nullcontext():
        assert process.wait(SECONDS)
    assert "] turn 0 " in log.read_text("utf-8")


def test_a_reader_that_is_slow_gets_everything(tmp_path: Path) -> None:
    """As long as it is not much behind; a descriptor that does not block is no matter."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    log = tmp_path / "logs/up.log"
    process = started(log, theirs)
    os.close(theirs)
    assert process.stdin is not None
    process.stdin.write(b"\n" * NUM_MANY)
    process.stdin.close()
    read = b""
    while chunk := os.read(ours, 4096):
        read += chunk
        time.sleep(0.001)
    assert process.stderr is not None
    process.stderr.close()
    os.close(ours)
    assert 0 == process.wait(SECONDS)
    assert log.read_bytes() == read
