"""The bridge from a role's thread to the engine's event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Hashable

import pytest

from rlstreams.workers.engines.thread import EngineThread

DEADLINE_S = 60.0


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError(value)
    return value


def ends(thread: EngineThread, number: int) -> dict[Hashable, asyncio.Task[int]]:
    """So many, with a deadline."""
    until_s = time.monotonic() + DEADLINE_S
    found: dict[Hashable, asyncio.Task[int]] = {}
    while len(found) < number:
        assert time.monotonic() < until_s, "not ended in time"
        found.update(thread.ended())
        time.sleep(0.001)
    return found


def test_every_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its result or its error, which is no line in the log where nobody asks for it."""
    thread = EngineThread()
    logged: list[logging.LogRecord] = []
    with monkeypatch.context() as patched:
        patched.setattr(logging.getLogger("asyncio"), "handle", logged.append)
        thread.start({value: echo(value) for value in (1, -2, 3)})
        tasks = ends(thread, 3)
        assert (1, 3) == (tasks[1].result(), tasks[3].result())
        thread.start({-4: echo(-4)})
        ends(thread, 1)  # and nobody looks at it
        thread.wait(asyncio.sleep(0), DEADLINE_S, "the loop")
        gc.collect()
    assert isinstance(tasks[-2].exception(), ValueError)
    assert [] == logged
    thread.close()


def test_what_is_cancelled_by_its_key_ends_and_the_rest_goes_on() -> None:
    """Both ends are told."""
    thread = EngineThread()
    gate = asyncio.Event()

    async def open_gate() -> None:
        gate.set()

    thread.start({"gone": gate.wait(), "kept": gate.wait()})
    thread.cancel({"gone", "never there"})
    ((key, task),) = ends(thread, 1).items()
    assert ("gone", True) == (key, task.cancelled())
    thread.wait(open_gate(), DEADLINE_S, "the loop")
    ((key, task),) = ends(thread, 1).items()
    assert ("kept", False) == (key, task.cancelled())
    thread.close()
