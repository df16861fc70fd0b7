"""What `up` prints: it goes on in a file once nobody is there to read it, and ends no run.

A pipe whose reader has left (`up | head`), and a terminal that hung up, refuse what is written.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast


@contextmanager
def lasting(log: Path) -> Iterator[None]:
    """In the block, standard output and error take everything; what they are refused is in `log`.

    The descriptor itself goes there at the first refusal, and stays: what writes past Python, and
    what is written after the block, is taken too.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream, log) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO, log: Path) -> TextIO:
    try:
        fd = stream.fileno()
    except (AttributeError, OSError):  # closed at the start; a test's
        return stream
    with suppress(OSError):
        stream.flush()
    return cast(TextIO, _Lasting(stream, fd, log))


class _Lasting:
    """A text stream that never raises `OSError`; what is no writing is the stream's own.

    It writes at once, past the stream, whose buffer would hold on to what was refused, or not.
    """

    def __init__(self, stream: TextIO, fd: int, log: Path) -> None:
        self._stream = stream
        self._fd = fd
        self._log = log
        self._has_left = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As a stream does."""
        self._send(text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def _send(self, data: bytes) -> None:
        try:
            while data:
                with suppress(BlockingIOError):  # its reader is slow, and it does not wait itself
                    data = data[os.write(self._fd, data) :]
                    continue
                select.select([], [self._fd], [])
        except OSError:
            if self._has_left:  # a full disk: nobody is told
                return
            self._has_left = True
            with suppress(OSError):
                _redirect(self._fd, self._log)
            self._send(data)


def _redirect(fd: int, log: Path) -> None:
    """This one, and the other of the two if it leads to the same place."""
    try:
        log.parent.mkdir(exist_ok=True)
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log_fd = os.open(os.devnull, os.O_WRONLY)
    at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    with suppress(OSError):
        os.write(log_fd, f"{at}: nobody reads on, what `up` prints is here\n".encode())
    for other in {fd, *(std for std in (1, 2) if _is_same(std, fd))}:
        os.dup2(log_fd, other)
    os.close(log_fd)


def _is_same(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:
        return False
