"""The process that outlives `up` where `up` itself is struck, and starts it again."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from types import FrameType


def survived(state_file: Path) -> int | None:
    """Become two processes: None in the one that is to be `up`, each time anew after it was killed
    as planned; in the other the exit status of the last one.

    Args:
        state_file: written by an `up` that is about to be killed as planned, and by no other.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    written_ns = 0
    while True:
        pid = os.fork()
        if not pid:
            for number, handler in before.items():
                signal.signal(number, handler)
            return None
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for all in the foreground
        signal.signal(signal.SIGTERM, partial(_pass_on, pid))
        _, ended = os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(ended)
        now_ns = state_file.stat().st_mtime_ns if state_file.exists() else 0
        if status != -signal.SIGKILL or now_ns == written_ns:
            return status if status >= 0 else 128 - status
        written_ns = now_ns


def _pass_on(pid: int, number: int, _frame: FrameType | None) -> None:
    os.kill(pid, number)
