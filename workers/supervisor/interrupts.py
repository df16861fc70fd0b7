"""Ctrl-C, SIGTERM and a terminal that hangs up, while `up` runs: counted, not raised."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first one drains, the second one kills. Use in a `with`, in the main thread.

    After the block signals mean what they meant before, so that an audit can be interrupted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        self._terminals = [fd for fd in (0, 1, 2) if _is_terminal(fd)]
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
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """What it is written to from now on would fail, and the drain with it."""
        null_fd = os.open(os.devnull, os.O_RDWR)
        for fd in self._terminals:
            os.dup2(null_fd, fd)
        os.close(null_fd)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
