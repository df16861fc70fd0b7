"""Waiting for a condition on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(reached: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
    """Look every few milliseconds.

    Raises:
        AssertionError: it did not come to be within `deadline_s`; says `what` is so instead.
    """
    until_s = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.002)
