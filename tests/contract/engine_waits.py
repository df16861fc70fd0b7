"""Waiting until an engine says what a test needs, with a deadline."""

from __future__ import annotations

import asyncio
import time

from rlstreams.workers.engines.base import Engine

DEADLINE_S = 300.0  # a real server on a busy machine samples some thousand tokens in it


async def until_running(engine: Engine, num: int = 1) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while (await engine.health()).running < num:
        assert time.monotonic() < until_s, "nothing runs"
        await asyncio.sleep(0.001)


async def until_sampled(engine: Engine, num_tokens: int) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while engine.num_sampled < num_tokens:
        assert time.monotonic() < until_s, "too little is sampled"
        await asyncio.sleep(0.001)


async def until_waiting(engine: Engine, num: int) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while (await engine.health()).waiting != num:
        assert time.monotonic() < until_s, f"not {num} requests wait"
        await asyncio.sleep(0.001)


async def until_idle(engine: Engine) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while (await engine.health()).running:
        assert time.monotonic() < until_s, "something runs on"
        await asyncio.sleep(0.001)
