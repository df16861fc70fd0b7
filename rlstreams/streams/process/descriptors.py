"""The limit of open files and sockets of a process, raised as far as the system allows."""

from __future__ import annotations

import resource

MOST = 65_536  # limit where the system has none; macOS refuses far larger ones


def raise_limit() -> int:
    """Raise this process's soft limit to its hard one, which its children inherit; return it.

    Shells give 256 (macOS) or 1024 for programs that use `select`, which ours do not.
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
