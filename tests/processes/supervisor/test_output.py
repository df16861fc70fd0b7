"""What `up` prints: the log file has every line, whoever reads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from rlstreams.words.screen import LiveInput
from tests.unit.report.test_live import live_input

ROOT = Path(__file__).parents[3]

# `up` in little: it watches, and at its end it tells. A line on standard input is a tick.
_UP = """
import sys
from pathlib import Path
from rlstreams.up.live.screen import output_to
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
NUM_TICKS = 3


def step(number: int) -> LiveInput:
    """Something was said."""
    return live_input(num_steps=1, message=f"tick {number} {'x' * 3000}")


def started(log: Path, stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _UP.format(log=str(log))], stdin=subprocess.PIPE, stdout=stdout,
        stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_log_file_has_every_line_and_nothing_that_was_drawn(
    tmp_path: Path, is_terminal: bool
) -> None:
    """A terminal gets a screen, a pipe the same lines as the file."""
    log = tmp_path / "logs/up.log"
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    process = started(log, theirs)
    os.close(theirs)
    process.stdin.write(b"\n" * NUM_TICKS)
    process.stdin.close()
    read = b""
    with suppress(OSError):  # of a terminal that nobody has open any more
        while chunk := os.read(ours, 4096):
            read += chunk
    os.close(ours)
    assert 0 == process.wait(SECONDS)
    with process.stderr or nullcontext():
        text = log.read_text("utf-8")
    assert "\x1b" not in text
    lines = text.splitlines()
    assert "run demo: complete" == lines[-1]
    assert NUM_TICKS == sum("] tick " in line for line in lines)
    assert (b"\x1b" in read) if is_terminal else (read == log.read_bytes())


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
    assert "] tick 0 " in log.read_text("utf-8")
