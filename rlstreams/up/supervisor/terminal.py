"""The terminal of `up`: signals that end a run, and single keys."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts SIGINT and SIGTERM: the first one drains, the second one kills.

    Use it in a `with` block of the main thread; afterwards signals mean what they meant before.
    A terminal that hangs up ends `up` as it ends any program.
    """

    def __init__(self) -> None:
        self._num_asked = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def drains(self) -> bool:
        """Whether the run is to end in good order."""
        return self._num_asked > 0

    @property
    def kills(self) -> bool:
        """Whether the run is to end at once."""
        return self._num_asked > 1

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._num_asked += 1


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
