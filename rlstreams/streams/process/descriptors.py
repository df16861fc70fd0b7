"""How many files and sockets a process may have open: as many as the system lets it."""

from __future__ import annotations

import resource

MOST = 65_536  # where the system knows no limit; macOS refuses what is far beyond


def raise_limit() -> int:
    """Raise this process's soft limit to its hard one, which what it starts inherits; returns it.

    Shells give 256 (macOS) or 1024 for the sake of programs that use `select`; ours do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a kernel with a lower limit of its own
        return soft
    return wanted
