"""Work in the trainer's loop that waits for computations, while iterations of the loop go on.

A `Resumable` is a generator: each `yield` hands the loop a computation, and receives its result;
`yield None` lets one iteration pass. It is no coroutine of asyncio: no event loop is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Resumable = Generator[Future[Any] | None, Any, T]
Compute = Callable[..., Future[Any]]  # begins a computation: a function and its arguments


def at_once(work: Callable[..., T], *given: object) -> Future[T]:
    """A `Compute` that runs the work at once."""
    future: Future[T] = Future()
    future.set_result(work(*given))
    return future


def run_now(work: Resumable[T]) -> T:
    """Resume the work to its end; its result."""
    result = None
    while True:
        try:
            future = work.send(result)
        except StopIteration as end:
            value: T = end.value
            return value
        result = future.result() if future else None
