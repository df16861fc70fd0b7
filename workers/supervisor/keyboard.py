"""Single key presses from the terminal, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
from types import TracebackType
from typing import Any


class Keyboard:
    """Reads keys while a `with` block lasts; gives none where standard input is no terminal."""

    def __init__(self) -> None:
        self._fd = -1
        self._saved: Any = None  # termios attributes

    def __enter__(self) -> Keyboard:
        if sys.stdin is not None and sys.stdin.isatty():
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
        if self._fd >= 0:
            import termios

            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
            self._fd = -1

    def pressed(self) -> str:
        """What was pressed since the last call."""
        if self._fd < 0 or not select.select([self._fd], [], [], 0)[0]:
            return ""
        return os.read(self._fd, 64).decode(errors="ignore")
