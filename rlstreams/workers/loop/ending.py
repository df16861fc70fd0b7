"""End of a command that is asked to, or that cannot go on: nothing that it started stays behind.

SIGTERM and a terminal that hangs up unwind the command as Ctrl-C does: a broker that was started
for a look is stopped. A pipe whose reader closed it ends a command as SIGPIPE would, and not as a
success, because its output is incomplete.
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

BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell reports it
# Errors whose reason is enough without the name of a file.
_NO_FAULT_OF_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit` in the block, with 128 and the signal's number.

    A signal that is ignored (`nohup`) stays so. After the first one, hang-ups are ignored until the
    process has ended: they often come twice, or behind SIGTERM, and would break off the unwinding
    or change the status. Outside of the main thread nothing changes.
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
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # no signal came
            signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SystemExit(128 + number)


def file_error_text(error: OSError) -> str:
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
    """Whether the working directory exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def status_of(error: OSError | SystemExit) -> int:
    """Exit status of a command that ended by this error; our own errors are raised again."""
    # rich handles a broken pipe in its own way
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # `| head` has read enough; Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    message = file_error_text(error) if isinstance(error, OSError) else ""
    if not message:
        raise error
    sys.stderr.write(f"{message}\n")
    return 1


def release_output() -> None:
    """Discard buffered output whose reader is gone, as after a terminal hung up.

    Else Python would flush it at its exit, fail, and end with 120 whatever the status is.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def speak_any_text() -> None:
    """Escape text that standard output cannot encode: a model's answer must not end a command."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
