"""The fork server out of the terminal's reach: the first module that it imports.

Ctrl-C, and a terminal that hangs up, signal every process of the foreground group: a server that
they end takes with it how its children end. Whoever starts it blocks those signals meanwhile
(`unheard`), and it inherits that: so there is no moment at which one of them could reach it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_FORK_SERVER = "from multiprocessing.forkserver import main"  # as `ensure_running` starts one


@contextmanager
def unheard() -> Iterator[None]:
    """What a terminal sends waits until the block is over; a process started in it never hears."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_TERMINAL)
    try:
        resource_tracker.ensure_running()  # started later it would unblock one of them
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_TERMINAL)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave() -> None:
    os.setsid()
    for number in _OF_A_TERMINAL:
        meaning = signal.signal(number, signal.SIG_IGN)  # forgets what waits
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        signal.signal(number, meaning)


def _is_fork_server() -> bool:
    """Of `unheard`: nobody else loses their terminal by an import, whatever signals they block."""
    is_one = any(word.startswith(_FORK_SERVER) for word in sys.orig_argv)
    return is_one and set(_OF_A_TERMINAL) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())


if _is_fork_server():
    _leave()
