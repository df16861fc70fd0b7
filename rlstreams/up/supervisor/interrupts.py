"""Ctrl-C, SIGTERM and a terminal that hangs up, while `up` runs: counted, not raised."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first one drains, the second one kills. Use in a `with`, in the main thread.

    A terminal that hangs up drains and no more: nobody chose it, and a lost connection tells it
    more than once, by the shell, by the kernel, and by whoever ends the session.
    After the block signals mean what they meant before, so that an audit can be interrupted; but
    a terminal that has hung up interrupts nothing more.
    """

    def __init__(self) -> None:
        self._num_asked = 0
        self._has_hung_up = False
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
            is_over = number is signal.SIGHUP and self._has_hung_up
            signal.signal(number, signal.SIG_IGN if is_over else handler)

    @property
    def drains(self) -> bool:
        """Whether the run is to end, in good order."""
        return self._has_hung_up or self._num_asked > 0

    @property
    def kills(self) -> bool:
        """Whether it is to end at once: somebody has asked twice."""
        return self._num_asked > 1

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._has_hung_up = True
        else:
            self._num_asked += 1
