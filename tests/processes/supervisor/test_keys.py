"""Keys of the live view, pressed at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECONDS = 60.0

# `up` in little, until a file is there.
_UP = """
import time
from pathlib import Path
from rlstreams.up.live.screen import LiveView
from tests.unit.report.test_live import live_input
with LiveView() as view:
    view.update(live_input())
    while not Path({end!r}).exists():
        if view.has_key():
            view.update(live_input())
        time.sleep(0.01)
"""


@contextmanager
def terminal(end: Path) -> Iterator[int]:
    """A terminal on which the view runs; it ends when the file `end` is there."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", _UP.format(end=str(end))],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip
    try:
        yield ours
        end.touch()
        shown(ours, "rollout-1 killed", after="\x1b[?1049l")
        assert 0 == process.wait(SECONDS)
        assert before == termios.tcgetattr(theirs), "the terminal is as it was"
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        os.close(ours)
        os.close(theirs)


def shown(terminal: int, words: str, after: str = "") -> None:
    """Read until the words are on it, behind `after`."""
    deadline_s, text = time.monotonic() + SECONDS, ""
    while words not in text.partition(after)[2] if after else words not in text:
        assert time.monotonic() < deadline_s, f"no {words!r} in {text!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            text += re.sub(r"\x1b\[[\d;]*m", "", os.read(terminal, 65536).decode("utf-8", "ignore"))


def test_a_key_opens_a_page_and_escape_closes_it(tmp_path: Path) -> None:
    """And nothing of it outlives the view: the terminal echoes again."""
    with terminal(tmp_path / "end") as keyboard:
        shown(keyboard, "the same problem")
        for key, words in (("?", "a second one kills"), ("\x1b", "the same problem"),
                           ("e", "no dead letters"), ("e", "the same problem")):  # fmt: skip
            os.write(keyboard, key.encode())
            shown(keyboard, words)
