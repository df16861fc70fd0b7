"""The state of a process, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Its letter (proc(5), stat): `T` is stopped, `Z` has ended and is not collected; "" is gone.

    A process may be collected between the opening of its file and the reading: the read then raises
    ProcessLookupError.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """It runs or sleeps: what nobody has collected yet does not."""
    return state_of(pid) not in ("", "Z", "X")
