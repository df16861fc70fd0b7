"""Signals while `up` runs, and the terminal that it may not touch."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlstreams.up.supervisor.terminal import Interrupts

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_counted_and_later_means_what_it_meant(number: signal.Signals) -> None:
    """Nothing is raised in the loop; the audit behind it can be interrupted again."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            told = [(interrupts.drains, interrupts.kills)]
            for _ in range(2):
                signal.raise_signal(number)
                told.append((interrupts.drains, interrupts.kills))
        assert [(False, False), (True, False), (True, True)] == told
        assert signal.SIG_DFL == signal.getsignal(number)
    finally:
        signal.signal(number, before)


# A shell in little: its child is in a group of its own; in the background unless it gets the
# terminal.
_SHELL = """
import os, signal, sys
mine = os.getpgrp()
child = os.fork()
if not child:
    os.setpgid(0, 0)
    while {is_front} and os.tcgetpgrp(0) != os.getpgrp():
        pass
    from rlstreams.up.supervisor.terminal import Interrupts, Keyboard
    with Keyboard() as keyboard, Interrupts() as interrupts:
        {middle}
        keyboard.pressed()
    os._exit(7)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if {is_front}:
    try:
        os.setpgid(child, child)
    except OSError:
        pass
    os.tcsetpgrp(0, child)
_, status = os.waitpid(child, os.WUNTRACED)
os.tcsetpgrp(0, mine)
print("stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status), file=sys.stderr)
if os.WIFSTOPPED(status):
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("is_front", "middle"),
    [
        (True, "pass"),
        (False, "pass"),
    ],
)
def test_the_terminal_is_left_alone_where_it_is_not_ours(is_front: bool, middle: str) -> None:
    """In the background setting it would stop the process; hung up, reading it would end it."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LEAD + _SHELL.format(is_front=is_front, middle=middle)],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
            check=False,
            timeout=120,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"7\n" == done.stderr


# The first terminal that the leader of a session opens is its own.
_LEAD = "import os; os.close(os.open(os.ttyname(0), os.O_RDWR))\n"
