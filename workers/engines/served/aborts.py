"""Ends requests early, also those that their server does not know yet.

Servers forget an abort of a request that has not come in; and one that comes in after a pause waits
there for the resumption. So whoever is to end is told of again until it is answered, and hung up on
in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress

from rlstreams.workers.engines.served.http import ServerError
from rlstreams.workers.engines.served.running import Requests, Running
from rlstreams.workers.engines.served.settings import ServedSettings

_TRIES = 30  # what was told of so often does not end by itself
_STILL = 3  # times that nothing was answered: what is left will not be


class RequestAborter:
    """Of one server's requests; belongs to its event loop."""

    def __init__(
        self, tell: Callable[[Running], Awaitable[bool]], settings: ServedSettings
    ) -> None:
        """
        Args:
            tell: asks the server to end a request; False: there is no way to but hanging up.
        """
        self._tell = tell
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()

    async def cut(self, running: Running) -> None:
        """Have it answered with what it has; returns when the server was told.

        Raises:
            ServerError: it could not be told.
        """
        running.is_aborted = True
        if await self._tell(running):
            self._begin(self._insist(running))
        else:
            running.hang_up()

    async def all_cut(self, requests: Requests, stop: Callable[[], Awaitable[None]]) -> None:
        """Until all are answered of a server that was stopped and has ended what it knew then.

        Who came in later is ended by stopping it again; but SGLang keeps such requests at its door.

        Args:
            stop: ends what the server knows.
        """
        num_still = 0
        while (num_left := len(requests)) and num_still < _STILL:
            with suppress(TimeoutError):
                await requests.ended(self._settings.again_s)
                return
            num_still = num_still + 1 if len(requests) == num_left else 0
            await stop()
        for running in requests:
            running.hang_up()
        await requests.ended()

    def leave(self, running: Running) -> None:
        """Nobody waits for it any more. Hanging up says so too, but SGLang looks for that every few
        seconds, and a router may keep it to itself."""
        self._begin(self._tell_twice(running))

    async def close(self) -> None:
        """Insist no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _insist(self, running: Running) -> None:
        for _ in range(_TRIES):
            if await running.ended(self._settings.again_s):
                return
            with suppress(ServerError):
                await self._tell(running)
        running.hang_up()

    async def _tell_twice(self, running: Running) -> None:
        with suppress(ServerError):  # then it samples to its end, for nobody
            if await self._tell(running):
                await asyncio.sleep(self._settings.again_s)  # it had not come in, perhaps
                await self._tell(running)
