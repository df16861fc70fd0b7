"""Waiting for a condition on an event loop, and a loop that waits for nothing."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any


async def until(reached: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
    """Look every few milliseconds.

    Raises:
        AssertionError: it did not come to be within `deadline_s`; says `what` is so instead.
    """
    until_s = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.002)


class _Jumps(selectors.DefaultSelector):
    """Instead of a wait its clock goes on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


def without_waiting(scenario: Coroutine[Any, Any, None]) -> None:
    """Run it on a loop whose clock jumps to the next timer: no machine is too slow for it."""
    selector = _Jumps()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario)
