"""Ends what user code has started, in whatever session: found by a mark in its environment.

Loaded by path in the process of user code too, so it imports nothing of ours. Linux only: elsewhere
processes of other sessions are left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "RLSTREAMS_USER_CODE"  # a mark of each process of user code; its descendants inherit it
_PASSES = 5  # what is forked while we look is found by the next pass
_AGAIN_S = 0.05  # a process that is about to be another program shows no environment for a moment


def end_descendants(mark: str) -> None:
    """Kill every other process of this user that carries the mark; one may have cleared it."""
    for number in range(_PASSES):
        found = list(_marked(f"{VARIABLE}={mark}".encode()))
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if number and not found:
            return
        time.sleep(_AGAIN_S)


def _marked(wanted: bytes) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if int(path.parent.name) != os.getpid() and wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
