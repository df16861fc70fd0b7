"""What `up` prints: where nobody reads it, it goes on in a file; it ends no run, and holds none up.

A pipe whose reader has left (`up | head`), and a terminal that hung up, refuse what is written. One
whose reader is there and does not read (a paused pager, Ctrl-S) takes nothing: a thread waits for
it, so that `up` needs not.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from rlstreams.up.supervisor.keyboard import is_ours

PATIENCE_S = 5.0  # longest wait of `up` for its reader
_KEPT_BYTES = 1_000_000  # for a reader that reads again; the file has all of it
_ESCAPE = b"\x1b"  # of a screen that is drawn; lines have none
_NO_SCREEN = b"\x1b[?1049l\x1b[?25h"  # the terminal as it was before one was drawn


@contextmanager
def lasting(log: Path) -> Iterator[None]:
    """In the block, standard output and error take everything; what they are refused is in `log`.

    The descriptor itself goes there at the first refusal, and stays: what writes past Python, and
    what is written after the block, is taken too. So it does at the end of the block if its reader
    does not read. One that reads again before is told the rest, at the end if nothing is written.
    """
    before = sys.stdout, sys.stderr
    made = [_lasting(stream, log) for stream in before]
    sys.stdout, sys.stderr = made
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in made:
            if isinstance(stream, _Lasting):
                stream.end()


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
        self._pen = _Pen(fd)
        self._lock = threading.RLock()  # a handler of a signal may write as well
        self._has_left = False  # the descriptor leads to the file
        self._aside: int | None = None  # the file, while the reader does not read
        self._kept = b""  # what it has not been told
        self._was_drawn = False  # a part of a screen is missing

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @property
    def is_unread(self) -> bool:
        """Whether the reader does not read: lines go to the file, screens nowhere."""
        return self._aside is not None and self._pen.is_busy

    def write(self, text: str) -> int:
        """As a stream does."""
        with self._lock:
            self._send(text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def end(self) -> None:
        """Nobody looks after the reader any more: what comes does not wait for it either.

        A terminal is made to go on, so that no screen stays on it.
        """
        with self._lock:
            if self._aside is None:
                return
            until_s = time.monotonic() + PATIENCE_S
            if self._pen.is_busy and self._was_drawn and _has_gone_on(self._fd):
                self._pen.wait(PATIENCE_S)
            has_refused = bool(self._pen.refused)
            if not self._pen.is_busy:
                self._pen.write(self._resumed(self._aside, b""))
                self._pen.wait(until_s - time.monotonic())
            if has_refused or self._pen.is_busy or self._pen.refused:
                self._leave()

    def _send(self, data: bytes) -> None:
        if self._has_left:
            with suppress(OSError):  # a full disk: nobody is told
                _write_all(self._fd, data)
            return
        if self.is_unread:
            self._put_aside(data)
            self._kept += data if len(self._kept) < _KEPT_BYTES and _ESCAPE not in data else b""
            return
        piece = data if self._aside is None else self._resumed(self._aside, data)
        began_s = time.monotonic()
        try:
            self._pen.write(piece)
            self._pen.wait(PATIENCE_S)
        finally:  # an interrupt loses nothing either
            if self._pen.is_busy:
                self._begin_aside(time.monotonic() - began_s)
                self._put_aside(data)
            elif self._pen.refused:
                self._leave()
                self._send(self._pen.refused)

    def _begin_aside(self, waited_s: float) -> None:
        if self._aside is None:  # else a handler of a signal came first
            self._aside = _opened(self._log)
            _note(self._aside, f"nobody has read on for {waited_s:.1f} s, `up` goes on here")

    def _put_aside(self, data: bytes) -> None:
        self._was_drawn = self._was_drawn or _ESCAPE in data
        if self._aside is not None and _ESCAPE not in data:
            with suppress(OSError):
                _write_all(self._aside, data)

    def _resumed(self, aside: int, data: bytes) -> bytes:
        """What it is told now that it reads again, or has left: the rest, unless it is a screen."""
        kept, self._kept = self._kept, b""
        was_drawn, self._was_drawn, self._aside = self._was_drawn, False, None
        if not self._pen.refused:
            _note(aside, "it is read again")
        os.close(aside)
        if self._pen.refused or _ESCAPE in data:  # the file has it; a screen shows all anew
            return data
        if len(kept) >= _KEPT_BYTES:
            kept += f"... the rest is in {self._log}\n".encode()
        return (_NO_SCREEN if was_drawn else b"") + kept + data

    def _leave(self) -> None:
        self._has_left = True
        with suppress(OSError):
            _redirect(self._fd, self._log)


class _Pen:
    """Writes to a descriptor in a daemon thread, one piece after another."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pieces: queue.Queue[bytes] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.refused = b""  # what is left of the newest piece if its reader has gone

    @property
    def is_busy(self) -> bool:
        """Whether a piece is on its way."""
        return not self.wait(0.0)

    def write(self, data: bytes) -> None:
        """Begin to."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()
        self._pieces.put(data)

    def wait(self, timeout_s: float) -> bool:
        """Whether all was taken, or refused, within that time."""
        pieces = self._pieces
        with pieces.all_tasks_done:
            return pieces.all_tasks_done.wait_for(lambda: not pieces.unfinished_tasks, timeout_s)

    def _run(self) -> None:
        while True:
            self.refused = _write_all(self._fd, self._pieces.get(), is_final=False)
            self._pieces.task_done()


def _write_all(fd: int, data: bytes, *, is_final: bool = True) -> bytes:
    """Until all of it is taken; returns what was refused.

    Raises:
        OSError: it was refused, if that is final.
    """
    try:
        while data:
            with suppress(BlockingIOError):  # its reader is slow, and it does not wait itself
                data = data[os.write(fd, data) :]
                continue
            select.select([], [fd], [])
    except OSError:
        if is_final:
            raise
    return data


def _opened(log: Path) -> int:
    try:
        log.parent.mkdir(exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _note(log_fd: int, text: str) -> None:
    with suppress(OSError):
        os.write(log_fd, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {text}\n".encode())


def _has_gone_on(fd: int) -> bool:
    """Whether it is our terminal; halted or full it takes what comes, and forgets what waited."""
    if not is_ours(fd):
        return False
    import termios

    with suppress(termios.error):  # it hung up just now
        termios.tcflush(fd, termios.TCOFLUSH)
        termios.tcflow(fd, termios.TCOOFF)  # only what this halts, that frees: Ctrl-S's halt too
        termios.tcflow(fd, termios.TCOON)
    return True


def _redirect(fd: int, log: Path) -> None:
    """This one, and the other of the two if it leads to the same place."""
    log_fd = _opened(log)
    _note(log_fd, "nobody reads on, what `up` prints is here")
    for other in {fd, *(std for std in (1, 2) if _is_same(std, fd))}:
        os.dup2(log_fd, other)
    os.close(log_fd)


def _is_same(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:
        return False
