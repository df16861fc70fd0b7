"""Keys that are pressed while the live view is on a terminal; without one there are none."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from contextlib import suppress
from typing import Any

ESCAPE = "\x1b"


class Keys:
    """Standard input, a key at a time. Use it in a `with` block.

    Ctrl-C stays a signal. In the background nothing is read or set: the system would halt us.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None  # how the terminal was; None: there is none

    def __enter__(self) -> Keys:
        with suppress(OSError, ValueError, termios.error):
            self._fd = sys.stdin.fileno()
            if self._is_ours():
                self._before = termios.tcgetattr(self._fd)
                tty.setcbreak(self._fd)
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError, termios.error):  # a terminal that hung up
            if self._before and self._is_ours():
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self) -> str:
        """The key since the last call, or ""; of one that sends several characters the first."""
        with suppress(OSError):
            if self._before and self._is_ours() and select.select([self._fd], [], [], 0)[0]:
                return os.read(self._fd, 64)[:1].decode("latin-1")
        return ""

    def _is_ours(self) -> bool:
        return os.isatty(self._fd) and os.tcgetpgrp(self._fd) == os.getpgrp()
