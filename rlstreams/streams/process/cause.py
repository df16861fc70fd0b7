"""The cause of a process's death, from its exit status, its log and the disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from pathlib import Path

LONGEST = 300  # characters of a cause
FULL_BYTES = 1 << 20  # free bytes below which a disk counts as full
_KERNEL = Path("/proc/vmstat")
_READ_BYTES = 1 << 16
# `module.NameError: text`, as Python prints it and as `runtime.explain` does; or the interpreter;
# or `program: error: text`, of arguments that argparse refuses.
_ERROR = re.compile(
    r"^(Fatal Python error\b|[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b"
    r"|[\w./-]+( \w+)?: error: ).*"
)
# What vLLM writes before each line of its processes' output, and of their logs.
_PROCESS = re.compile(r"^\(\w+ pid=\d+\) ?(ERROR [-\d]+ [:.\d]+ \[[^]]*\] ?)?")
_ELSEWHERE = "See root cause above"  # vLLM's last error: that of another of its processes is meant
_NEXT_LINES = {": ": 1, "validation error": 2, "validation errors": 2}  # where the text goes on
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


def died(status: int) -> str:
    """Return an exit status in words; negative: minus the number of a signal."""
    if status >= 0:
        return f"failed (exit {status})" if status else "is done"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def memory_kills() -> int:
    """Return the number of processes that this machine's kernel has killed for want of memory.

    Kills within a control group's limit count too. 0 where the kernel does not count them.

    Source: https://www.kernel.org/doc/html/latest/admin-guide/cgroup-v2.html (`oom_kill`).
    """
    try:
        lines = _KERNEL.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def last_error(log: Path, start: int = 0) -> str:
    """Return the last error in a log behind its first `start` bytes; "" if it names none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _READ_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = ""
    behind: list[str] = []  # the lines behind, the next one first
    for line in (_PROCESS.sub("", line) for line in reversed(lines)):
        if _ERROR.match(line):
            more = next((n for words, n in _NEXT_LINES.items() if _goes_on(line, words)), 0)
            found = (
                line + ("" if line.endswith(" ") else " ") * bool(more) + " ".join(behind[:more])
            )
            if _ELSEWHERE not in line:
                break
        if line.strip():
            behind.insert(0, line.strip())
    return found if len(found) <= LONGEST else f"{found[:LONGEST]}..."


def _goes_on(line: str, words: str) -> bool:
    """Whether the text of an error begins, or goes on, on the next line."""
    return line.endswith(words) or f" {words} for " in line


def is_about_room(text: str) -> bool:
    """Whether an error says that a disk or a quota is full."""
    return any(words in text for words in _NO_ROOM)


def is_full(folder: Path) -> bool:
    """Whether the disk under a folder is full; False for a folder that is not there."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False
