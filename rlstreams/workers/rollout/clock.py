"""Deadlines of samples that stand still while the engine sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SampleClock:
    """Deadlines of samples under way; lives on the engine's event loop."""

    def __init__(self) -> None:
        self._left_s: dict[asyncio.Timeout, float] = {}  # as of the last stop
        self._is_stopped = False

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """A deadline for the block, as `asyncio.timeout`."""
        async with asyncio.timeout(None if self._is_stopped else seconds) as timeout:
            self._left_s[timeout] = seconds
            try:
                yield
            finally:
                del self._left_s[timeout]

    def stop(self) -> None:
        """Stop all deadlines."""
        self._is_stopped, now_s = True, asyncio.get_running_loop().time()
        for timeout in self._left_s:
            if (until_s := timeout.when()) is not None and not timeout.expired():
                self._left_s[timeout] = until_s - now_s
                timeout.reschedule(None)

    def go_on(self) -> None:
        """Start them again: each sample has the time that it had left."""
        self._is_stopped, now_s = False, asyncio.get_running_loop().time()
        for timeout, left_s in self._left_s.items():
            if timeout.when() is None:
                timeout.reschedule(now_s + left_s)
