"""Standard output of `up`: its log file has every line, and nothing of what is drawn."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast

_GONE = (errno.EPIPE, errno.EIO)


@contextmanager
def output_to(log: Path) -> Iterator[Output]:
    """`sys.stdout` as an `Output` in the block."""
    before, output = sys.stdout, Output(sys.stdout, log)
    sys.stdout = cast(TextIO, output)
    try:
        yield output
    finally:
        sys.stdout = before


class Output:
    """A text stream that writes to its log file, and to its reader."""

    def __init__(self, reader: TextIO, log: Path) -> None:
        self.reader = reader
        self._log = log  # made with its first line: a start that is refused changes nothing

    def __getattr__(self, name: str) -> object:
        return getattr(self.reader, name)

    def write(self, text: str) -> int:
        """Into the log file, and to the reader.

        Raises:
            OSError: the reader is gone. A full disk loses the line for whoever is on that disk.
        """
        self.note(text)
        try:
            self.reader.write(text)
            self.reader.flush()
        except OSError as err:
            if err.errno in _GONE:
                raise
        return len(text)

    def note(self, text: str) -> None:
        """Into the log file alone."""
        with suppress(OSError):
            self._log.parent.mkdir(exist_ok=True)
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(fd, text.encode("utf-8", "backslashreplace"))
            finally:
                os.close(fd)
