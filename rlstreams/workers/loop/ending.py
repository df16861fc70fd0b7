"""How a command ends that is told to, or that cannot go on: nothing that it started stays behind.

SIGTERM and a terminal that hangs up are answered as Ctrl-C is, by unwinding: a broker that was
started for a look is stopped. A pipe whose reader has seen enough ends a command as SIGPIPE would;
it is no success, for what was to be said was not said.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell tells it
# Where the name of a file is not known, the reason alone says enough.
_NO_FAULT_OF_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit` in the block, with 128 and the signal's number.

    A signal that is ignored (`nohup`) stays so. Once one came, a hang-up is ignored until the
    process has ended: it often comes twice, or behind SIGTERM, and would break off the unwinding or
    change the status. Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nobody asked for the end
            signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SystemExit(128 + number)


def told_file_error(error: OSError) -> str:
    """One line for a file that cannot be used, a full disk included; empty if it is our mistake."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{type(error).__name__}: {os.fsdecode(error.filename)}: {reason}"
    if error.errno in _NO_FAULT_OF_OURS:
        return f"{type(error).__name__}: {reason}; free some, or name another folder"
    if isinstance(error, FileNotFoundError) and not has_here():
        return "FileNotFoundError: the working directory was deleted: change to one that is there"
    return ""


def has_here() -> bool:
    """Whether the working directory is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def status_of(error: OSError | SystemExit) -> int:
    """The status of a command that ended so, which is told what it needs; ours are raised again."""
    # rich has an answer of its own to a broken pipe
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # `| head` has seen enough; Python would complain again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    told = told_file_error(error) if isinstance(error, OSError) else ""
    if not told:
        raise error
    sys.stderr.write(f"{told}\n")
    return 1


def release_output() -> None:
    """Lose what a reader that is gone was still to be told, as after a terminal hung up.

    Else Python would flush it at its exit, fail, and end with 120 whatever the status is.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def speak_any_text() -> None:
    """What standard output cannot spell is escaped: an answer of a model ends no command."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
