"""The way to a judge's server that sleeps while other roles have its device.

Requests wait here for the server's shift. One that has waited for `HOLD_S` is answered 503 with the
name of the role that has the device, and is to be sent again: no client takes a server that sleeps
for one that hangs, and none waits in a request for minutes.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from rlstreams.workers.engines.served.http import ServerHttp

HOLD_S = 4.0  # below the time-outs of clients
FINISH_S = 20.0  # for requests under way, before the server sleeps
MAX_BYTES = 64 << 20  # of a request
_AGAIN = {"Retry-After": "0"}


class Gate:
    """Listens at the judge's address; its coroutines run on one event loop.

    Args:
        server: address of the server behind it.
        change_s: time limit of falling asleep, and of waking up.
    """

    def __init__(self, server: str, change_s: float) -> None:
        self._http = ServerHttp(server)
        self._server, self._change_s = server, change_s
        self._is_open = asyncio.Event()
        self._inside: set[asyncio.Task[web.Response]] = set()
        self._is_asleep = False
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.num_asked = self.num_answered = 0
        self.shut_because = ""
        """Why requests wait, in words."""

    async def start(self, host: str, port: int) -> None:
        """Listen; shut at first.

        Raises:
            OSError: the address is taken.
        """
        limit = aiohttp.ClientTimeout(total=None)  # the client's own ends both
        self._session = aiohttp.ClientSession(
            timeout=limit, connector=aiohttp.TCPConnector(limit=0)
        )
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def open(self) -> None:
        """Wake the server, and let requests through.

        Raises:
            ServerError: it does not wake.
        """
        if self._is_asleep:
            await self._http.post("/wake_up", None, self._change_s, what="waking up")
            self._is_asleep = False
        self._is_open.set()

    async def shut(self) -> None:
        """Hold requests back, let those under way end or cut them, and have the server sleep.

        Raises:
            ServerError: it does not sleep, and may have its memory still.
        """
        self._is_open.clear()
        if self._inside:
            await asyncio.wait(self._inside, timeout=min(FINISH_S, self._change_s / 2))
        for task in self._inside:
            task.cancel()
        # At level 1 the weights stay on the host: nobody brings them anew.
        await self._http.post("/sleep?level=1", None, self._change_s, what="going to sleep")
        self._is_asleep = True

    async def close(self) -> None:
        """Listen no more; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        await self._http.close()

    async def _handle(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        try:
            body = await request.read()
            try:
                async with asyncio.timeout(HOLD_S):
                    await self._is_open.wait()
            except TimeoutError:
                return web.Response(status=503, text=self.shut_because, headers=_AGAIN)
            task = asyncio.create_task(self._passed_on(request, body))
            self._inside.add(task)
            task.add_done_callback(self._inside.discard)
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:  # the client hung up
                task.cancel()
                raise
            if task.cancelled():
                why = f"was cut as its shift ended: {self.shut_because}"
                return web.Response(status=503, text=why, headers=_AGAIN)
            return task.result()
        finally:
            self.num_answered += 1

    async def _passed_on(self, request: web.Request, body: bytes) -> web.Response:
        assert self._session is not None
        named = ("Content-Type", "Authorization")
        headers = {name: request.headers[name] for name in named if name in request.headers}
        address = self._server + request.path_qs
        try:
            async with self._session.request(
                request.method, address, data=body, headers=headers
            ) as answer:
                content = await answer.read()
                said = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                return web.Response(status=answer.status, body=content, headers=said)
        except (aiohttp.ClientError, OSError) as err:
            text = f"no answer from {self._server}: {type(err).__name__}: {err}"
            return web.Response(status=502, text=text)
