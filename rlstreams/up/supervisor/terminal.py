"""The terminal of `up`: signals that end a run, single keys, lasting output."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TextIO, cast

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP: the first one drains, the second one kills.

    Use it in a `with` block of the main thread; afterwards signals mean what they meant before.
    A lost terminal sends SIGHUP several times, so after the first one it is ignored.
    """

    def __init__(self) -> None:
        self._num_asked = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue  # `nohup`
            self._before[number] = before
            signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    @property
    def drains(self) -> bool:
        """Whether the run is to end in good order."""
        return self._num_asked > 0

    @property
    def kills(self) -> bool:
        """Whether the run is to end at once."""
        return self._num_asked > 1

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._num_asked += 1
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)


class Keyboard:
    """Keys as they are pressed, while a `with` block lasts; none without a terminal.

    A process in the background leaves the terminal alone: the kernel would stop it.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._saved: Any = None  # termios attributes

    def __enter__(self) -> Keyboard:
        if sys.stdin is not None and sys.stdin.isatty() and _is_ours(sys.stdin.fileno()):
            import termios
            import tty

            self._fd = sys.stdin.fileno()
            self._saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._fd >= 0 and _is_ours(self._fd):  # else its shell sets it
            import termios

            with suppress(termios.error):  # it hung up just now
                termios.tcsetattr(self._fd, termios.TCSANOW, self._saved)
        self._fd = -1

    def pressed(self) -> str:
        """What was pressed since the last call."""
        if self._fd < 0 or not _is_ours(self._fd) or not select.select([self._fd], [], [], 0)[0]:
            return ""
        with suppress(OSError):  # it hung up just now
            return os.read(self._fd, 64).decode(errors="ignore")
        return ""


def _is_ours(fd: int) -> bool:
    """Whether a terminal is there, and we are in its foreground."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def lasting(log: Path) -> Iterator[None]:
    """Standard output and error that go on in `log` once their terminal or pipe is gone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream, log)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that writes at once and never raises `OSError`."""

    def __init__(self, stream: TextIO, log: Path) -> None:
        stream.flush()
        self._stream = stream
        self._log = log
        self._has_left = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As a stream does."""
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._stream.fileno(), data) :]
            except BlockingIOError:
                select.select([], [self._stream.fileno()], [])
            except OSError:
                if self._has_left or not self._redirect():
                    break  # the disk is full too
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def _redirect(self) -> bool:
        """The descriptor, and the other one where it leads to the same place."""
        self._has_left = True
        fd = self._stream.fileno()
        with suppress(OSError):
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab", buffering=0) as log:
                at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
                log.write(f"{at}: nobody reads on, what `up` prints is here\n".encode())
                for other in {fd, *(std for std in (1, 2) if os.path.sameopenfile(std, fd))}:
                    os.dup2(log.fileno(), other)
            return True
        return False
