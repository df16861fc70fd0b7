"""Single key presses from the terminal, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any


class Keyboard:
    """Reads keys while a `with` block lasts; gives none where standard input is no terminal.

    A process in the background leaves the terminal alone: it would be stopped for touching it.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._saved: Any = None  # termios attributes

    def __enter__(self) -> Keyboard:
        if sys.stdin is not None and sys.stdin.isatty() and is_ours(sys.stdin.fileno()):
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
        if self._fd >= 0 and is_ours(self._fd):  # else its shell sets it as it likes
            import termios

            # Now, for what is printed may never be taken: it may be halted, by Ctrl-S.
            with suppress(termios.error):  # it hung up just now
                termios.tcsetattr(self._fd, termios.TCSANOW, self._saved)
        self._fd = -1

    def pressed(self) -> str:
        """What was pressed since the last call."""
        if self._fd < 0 or not is_ours(self._fd):
            return ""
        if not select.select([self._fd], [], [], 0)[0]:
            return ""
        with suppress(OSError):  # it hung up just now
            return os.read(self._fd, 64).decode(errors="ignore")
        return ""


def is_ours(fd: int) -> bool:
    """Whether a terminal is there, and we are in its foreground."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
