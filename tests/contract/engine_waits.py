"""Waiting until an engine says what a test needs, with a deadline."""

from __future__ import annotations

import asyncio
import time

from rlstreams.workers.engines.base import Engine, PauseMode
from rlstreams.workers.engines.local import LocalEngine
from rlstreams.workers.engines.served.engine import ServedEngine

DEADLINE_S = 300.0  # a real server on a busy machine samples some thousand tokens in it


def num_running(engine: Engine) -> int:
    """Requests that sample now."""
    if isinstance(engine, LocalEngine):
        return len(engine._decoder.running)
    assert isinstance(engine, ServedEngine)
    return sum(len(server.requests) for server in engine._servers)


def num_waiting(engine: Engine) -> int:
    """Requests that wait for a slot."""
    if isinstance(engine, LocalEngine):
        return len(engine._scheduler.waiting)
    assert isinstance(engine, ServedEngine)
    return engine._num_waiting


async def until_running(engine: Engine, num: int = 1) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while num_running(engine) < num:
        assert time.monotonic() < until_s, "nothing runs"
        await asyncio.sleep(0.001)


async def until_sampled(engine: Engine, num_tokens: int) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while engine.num_sampled < num_tokens:
        assert time.monotonic() < until_s, "too little is sampled"
        await asyncio.sleep(0.001)


async def until_waiting(engine: Engine, num: int) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while num_waiting(engine) != num:
        assert time.monotonic() < until_s, f"not {num} requests wait"
        await asyncio.sleep(0.001)


async def stand_still(engine: Engine) -> None:
    """An engine of this process samples nothing until `go_on`, not even by a pull."""
    if isinstance(engine, LocalEngine):
        await engine._ask(lambda: setattr(engine._scheduler, "_paused", True), "standing still")


def go_on(engine: Engine) -> None:
    if isinstance(engine, LocalEngine):
        engine._post(engine._scheduler.resume)


async def cut(engine: Engine) -> None:
    """What runs ends with ABORT; what waits is sampled next."""
    if isinstance(engine, LocalEngine):
        await engine._ask(engine._scheduler.stop, "cutting")
        return go_on(engine)
    assert isinstance(engine, ServedEngine)
    for server in engine._servers:
        await server._stop(PauseMode.ABORT)
        await server._met.resume()


async def until_idle(engine: Engine) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while num_running(engine):
        assert time.monotonic() < until_s, "something runs on"
        await asyncio.sleep(0.001)
