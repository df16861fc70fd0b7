"""Ends what user code has started, in whatever session: found by a mark in its environment.

Loaded by path in the process of user code too, so it imports nothing of ours. Linux only: elsewhere
processes of other sessions are left.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "RLSTREAMS_USER_CODE"  # a mark of each process of user code; its descendants inherit it
_PASSES, _AGAIN_S = 20, 0.05  # what is forked while we look is found by the next pass


def end_descendants(mark: str) -> None:
    """Kill every other process of this user that carries the mark; one may have cleared it."""
    for number in range(_PASSES):
        pids, is_unclear = _marked(f"{VARIABLE}={mark}".encode())
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if number and not pids and not is_unclear:
            return
        time.sleep(_AGAIN_S)


def _marked(wanted: bytes) -> tuple[list[int], bool]:
    """Who carries it, and whether a process shows no environment because it becomes a program."""
    found, is_unclear = [], False
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            shown = (folder / "environ").read_bytes()
            if int(folder.name) != os.getpid() and wanted in shown.split(b"\0"):
                found.append(int(folder.name))
            elif not shown:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                is_unclear |= state != "Z" and parent not in ("0", "2")  # kernel threads have none
    return found, is_unclear
