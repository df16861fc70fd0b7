"""Processes by a mark in their environment, which all that they start inherits.

    python -I -S marked.py NAME VALUE

kills those that carry the mark once its standard input closes, the owner pipe of `Child`: a pytest
that is killed runs no teardown, and brokers, servers and `up`s would live on. Linux only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

SWEEP_S = 20.0  # a killed process may have begun others, and big ones take a while to go


def marked(name: str, value: str) -> dict[int, str]:
    """Living processes, but this one, whose variable `name` is `value`: process id to program."""
    found, mark = {}, f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            program = (folder / "comm").read_text("utf-8").strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended in between, or not ours
        if mark in variables and int(folder.name) != os.getpid():
            found[int(folder.name)] = program
    return found


def kill_marked(name: str, value: str) -> None:
    """Kill them, and those that they began meanwhile."""
    until_s = time.monotonic() + SWEEP_S
    while (pids := marked(name, value)) and time.monotonic() < until_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_marked(*sys.argv[1:])
