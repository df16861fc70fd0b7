"""The bridge from a role's thread to the engine's event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
from queue import SimpleQueue

import pytest

from rlstreams.workers.engines.thread import EngineThread

DEADLINE_S = 60.0


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError(value)
    return value


def test_every_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its result or its error, which is no line in the log where nobody asks for it."""
    thread = EngineThread()
    ended: SimpleQueue[tuple[int, asyncio.Task[int]]] = SimpleQueue()

    def tell(value: int) -> tuple[object, object, object]:
        return value, echo(value), lambda task: ended.put((value, task))

    logged: list[logging.LogRecord] = []
    with monkeypatch.context() as patched:
        patched.setattr(logging.getLogger("asyncio"), "handle", logged.append)
        thread.start([tell(value) for value in (1, -2, 3)])  # type: ignore[misc]
        tasks = dict(ended.get(timeout=DEADLINE_S) for _ in range(3))
        assert (1, 3) == (tasks[1].result(), tasks[3].result())
        thread.start([tell(-4)])  # type: ignore[list-item]
        ended.get(timeout=DEADLINE_S)  # and nobody looks at it
        thread.wait(asyncio.sleep(0), DEADLINE_S, "the loop")
        gc.collect()
    assert isinstance(tasks[-2].exception(), ValueError)
    assert [] == logged
    thread.close()


def test_what_is_cancelled_by_its_key_ends_and_the_rest_goes_on() -> None:
    """Both ends are told."""
    thread = EngineThread()
    ended: SimpleQueue[tuple[str, asyncio.Task[None]]] = SimpleQueue()
    gate = asyncio.Event()

    def tell(key: str) -> tuple[object, object, object]:
        return key, gate.wait(), lambda task: ended.put((key, task))

    async def open_gate() -> None:
        gate.set()

    thread.start([tell("gone"), tell("kept")])  # type: ignore[misc]
    thread.cancel({"gone", "never there"})
    key, task = ended.get(timeout=DEADLINE_S)
    assert ("gone", True) == (key, task.cancelled())
    thread.wait(open_gate(), DEADLINE_S, "the loop")
    key, task = ended.get(timeout=DEADLINE_S)
    assert ("kept", False) == (key, task.cancelled())
    thread.close()
