"""Standard output of `up`: a log file that has every line, and a reader who is never waited for.

A terminal that is halted (Ctrl-S) or a pipe that nobody empties would otherwise hold the loop that
restarts the roles. What does not fit meanwhile is left out there, and is in the log file.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast

WAITING_BYTES = 1 << 20
FLUSH_S = 2.0  # at the end, for a reader that has not read all
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
        output.close()


class Output:
    """A text stream that writes to its log file at once, and to its reader from a thread."""

    def __init__(self, stream: TextIO, log: Path) -> None:
        stream.flush()
        self._stream = stream
        self._log = log  # made with its first line: a start that is refused changes nothing
        self._log_fd = -1
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # waiting, what is being written included
        self._has_left_out = False
        self._is_gone = False
        self._over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._copy, name="output", daemon=True).start()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @property
    def is_behind(self) -> bool:
        """Whether the reader has not taken all yet."""
        return self._num_bytes > 0

    def write(self, text: str) -> int:
        """Into the log file, and to the reader.

        Raises:
            BrokenPipeError: the reader is gone; once.
        """
        self.note(text)
        return self.draw(text)

    def note(self, text: str) -> None:
        """Into the log file alone."""
        with suppress(OSError):  # a full disk: the reader has it
            if self._log_fd < 0:
                self._log.parent.mkdir(exist_ok=True)
                self._log_fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(self._log_fd, text.encode("utf-8", "backslashreplace"))

    def draw(self, text: str) -> int:
        """To the reader alone. Raises as `write`."""
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        with self._changed:
            if self._is_gone and not self._over:
                self._over = True
                raise BrokenPipeError(errno.EPIPE, "nobody reads the output of `up` any more")
            if self._num_bytes + len(data) > WAITING_BYTES:
                self._has_left_out = True
            elif not self._over:
                self._waiting.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing is waited for; see `close`."""

    def close(self) -> None:
        """Wait for the reader, at most `FLUSH_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes or self._is_gone, FLUSH_S)
            self._over = True
            self._changed.notify_all()
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _copy(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
                if self._has_left_out and not self._waiting:
                    self._has_left_out = False
                    data += b"\n(more was said meanwhile: it is in the run's logs/up.log)\n"
            try:
                self._write(data)
            except OSError as err:
                self._is_gone = err.errno in _GONE  # else a full disk: the next line may fit
            with self._changed:
                self._num_bytes = sum(map(len, self._waiting))
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._stream.fileno(), data) :]
            except BlockingIOError:  # a descriptor that does not block, as some parents leave it
                time.sleep(0.01)


class Drawing:
    """An `Output` as a stream for whoever draws on it: nothing of that is in the log file."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def __getattr__(self, name: str) -> object:
        return getattr(self._output, name)

    def write(self, text: str) -> int:
        """As a stream does. Raises as `Output.write`."""
        return self._output.draw(text)
