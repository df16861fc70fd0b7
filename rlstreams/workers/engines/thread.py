"""The bridge from a role's synchronous loop to an engine's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Hashable, Iterator, Mapping, Set
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

CLOSE_S = 10.0  # longest wait for the loop's thread to end
T = TypeVar("T")


class EngineThread:
    """An event loop in a thread of its own; the role hands it coroutines and keeps the futures."""

    def __init__(self, name: str = "engine-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[Any], Hashable] = {}
        self._ended: SimpleQueue[tuple[Hashable, asyncio.Task[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coroutine` on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self, work: Mapping[Hashable, Coroutine[Any, Any, Any]]) -> None:
        """Start coroutines by their keys, waking the loop up once; see `ended`."""

        def begin() -> None:
            for key, coroutine in work.items():
                task = self._loop.create_task(coroutine)
                self._tasks[task] = key  # keeps a reference: the loop itself has only a weak one
                task.add_done_callback(self._end)

        if work:
            self._loop.call_soon_threadsafe(begin)

    def ended(self) -> Iterator[tuple[Hashable, asyncio.Task[Any]]]:
        """Tasks ended since the last call, cancelled or not, with keys; in order of ending."""
        while not self._ended.empty():
            yield self._ended.get()

    def _end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved: an uncollected error would be logged
        self._ended.put((self._tasks.pop(task), task))

    def cancel(self, keys: Set[Hashable]) -> None:
        """Cancel the unfinished tasks of these keys; they end like all others."""

        def cancel() -> None:
            for task, key in list(self._tasks.items()):
                if key in keys:
                    task.cancel()

        if keys:
            self._loop.call_soon_threadsafe(cancel)

    def wait(self, coroutine: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """Run `coroutine` to its end.

        Raises:
            TimeoutError: not done within `deadline_s`; names `what`.
        """
        try:
            return self.submit(coroutine).result(deadline_s)
        except TimeoutError as err:
            raise TimeoutError(f"{what} did not answer within {deadline_s:g} s") from err

    def close(self) -> None:
        """Cancel running tasks and end the loop; idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()
