"""A sandbox: a few processes of the same user code, and the event loop that talks to them.

A call or object stays in the process where it was placed. Processes are started as they are needed;
one that cannot be added holds up no call while others run; one that ends is replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rlstreams.streams.log.errors import ConfigError, DeadlineError
from rlstreams.workers.config.nearest import meant_path
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.sandbox.process import Process
from rlstreams.workers.sandbox.user_code import (
    EditedCodeError,
    LostCallError,
    UserCode,
    UserCodeError,
)

PATIENCE_S = 10.0  # for one more process, while others could take the call
RETRY_S = 60.0  # from a start of one more that failed to the next
CLOSE_S = 5.0  # at the end of a worker, for all that is open in one process

T = TypeVar("T")


class Sandbox:
    """Places calls, or objects with state, in at most `code.processes` processes.

    Raises:
        ConfigError: from the constructor, if the code cannot be loaded; names `field`.
        DeadlineError: from the constructor, if the system has no process for it.
    """

    def __init__(self, code: UserCode, field: str, note: Callable[[str], None]) -> None:
        """Start the first process.

        Args:
            field: of the configuration, that names the code.
            note: called with problems beside calls, for the log.
        """
        if code.file and not Path(code.file).is_file():
            raise ConfigError(f"{field}: there is no file {code.file}{meant_path(code.file)}")
        self.code = code
        self.note = note
        self.patience_s = PATIENCE_S
        self.processes: list[Process] = []
        self._starting: asyncio.Task[UserCodeError | EditedCodeError | None] | None = None
        self._started_s = self._retry_s = 0.0  # monotonic
        self.is_closed = False
        self._files = code.files()  # all of its processes run the same
        try:
            self._thread = EngineThread("sandbox")
        except (OSError, RuntimeError) as err:  # RuntimeError: no room for a thread
            raise DeadlineError(f"{code} has no process: no loop can be started: {err}") from None
        try:
            self._thread.submit(self._start()).result()
        except UserCodeError as err:
            self._thread.close()
            if isinstance(err, LostCallError):
                raise DeadlineError(str(err)) from None
            raise ConfigError(f"{field}: {err}") from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the sandbox's loop.

        Raises:
            UserCodeError: the sandbox is closed.
        """
        if self.is_closed:
            coroutine.close()
            raise UserCodeError(f"{self.code} is closed")
        return self._thread.submit(coroutine)

    async def within(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The same from another loop; cancelled if the caller is."""
        return await asyncio.wrap_future(self.submit(coroutine))

    async def place(self, key: str) -> Process:
        """A process for one more: a new one while the others are full and more may run.

        The caller discards `key` from the process's `open` in the end.

        Raises:
            EditedCodeError: none is left, and another would run other code.
            LostCallError: none is left, and the system has no room for one.
            UserCodeError: none is left, and none can be started.
        """
        while not self.is_closed and self._wants_another():
            if self._starting is None or self._starting.done():
                self._started_s = time.monotonic()
                self._starting = asyncio.get_running_loop().create_task(self._start_another())
            starting = self._starting  # a later one may take its place meanwhile
            waited_s = time.monotonic() - self._started_s
            patience_s = max(0.0, self.patience_s - waited_s) if self._alive else None
            # A caller that gives up leaves the start alone: others wait for it too.
            done, _ = await asyncio.wait({starting}, timeout=patience_s)
            if not done and self._alive:
                break
            error = starting.result() if done else None
            if error is not None and not self._alive:
                raise type(error)(str(error))
        if self.is_closed:
            raise UserCodeError(f"{self.code} is closed")
        chosen = min(self._alive, key=lambda process: len(process.open))
        chosen.open.add(key)
        return chosen

    def close(self) -> None:
        """Close what is open, each process within `CLOSE_S`, and end them; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._thread.submit(self._end()).result()
            self._thread.close()

    @property
    def _alive(self) -> list[Process]:
        return [process for process in self.processes if not process.broken]

    def _wants_another(self) -> bool:
        self.processes = [process for process in self.processes if not process.is_over]
        if not (alive := self._alive):
            return True
        # Objects with state are spread out at once; of mere calls each process takes what it can.
        is_class = self.code.kind == "class"
        is_full = all(len(one.open) >= (1 if is_class else one.room) for one in alive)
        may_start = len(alive) < self.code.processes
        return is_full and may_start and time.monotonic() >= self._retry_s

    async def _start(self) -> None:
        process = await Process.started(self.code)
        if edited := sorted(set(self._files.items()) ^ set(self.code.files().items())):
            await process.end("is closed")
            raise EditedCodeError(
                f"{self.code}: {edited[0][0]} was edited after this worker had read it, so another "
                "process of it would judge by other code than the samples before"
            )
        self.processes.append(process)  # to the list as it is by now

    async def _start_another(self) -> UserCodeError | EditedCodeError | None:
        """The error, if it cannot be started; then the next try is after a while."""
        try:
            await self._start()
        except (UserCodeError, EditedCodeError) as err:
            self._retry_s = time.monotonic() + RETRY_S
            self.note(f"one more process of user code cannot be started: {err}")
            return err
        return None

    async def _end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await asyncio.gather(*(self._end_one(process) for process in self.processes))

    async def _end_one(self, process: Process) -> None:
        if self.code.kind == "class" and process.open and not process.broken:
            await process.last_call({"close": sorted(process.open)}, CLOSE_S)
        await process.end("is closed")
