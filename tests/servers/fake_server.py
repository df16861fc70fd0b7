"""`MarkovServer` behind the HTTP routes of vLLM 0.32.0 or 0.25.1, or of SGLang 0.5.17 or 0.5.23.

It runs on a loop of its own thread, as a server does. `misbehave` makes the next answers wrong in
one way; `kill` closes its port and breaks all connections.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from tests.servers.fake_plugin import FakePlugin
from tests.servers.host import Answer
from tests.servers.markov import Job, MarkovServer
from tests.servers.sglang_routes import SglangRoutes
from tests.servers.vllm_routes import VllmRoutes

ROUTES = {"vllm": VllmRoutes, "sglang": SglangRoutes}  # by kind
Spoil = Callable[[Answer], Answer]
_DEADLINE_S = 60.0
_STILL_S = 0.001
_TICKS = 10  # of the loop, until whoever was accepted is known to the server
_LOADING = (
    "/collective_rpc",
    "/update_weights",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
)
# What a front end answers by itself, whatever its engine does.
_FRONT = ("/health", "/openapi.json", "/version", "/v1/models", "/get_world_size", "/workers")
# The first and the third name versions themselves, the second by our plugin's records.
TELLING = ("vllm-0.32.0", "vllm-0.25.1", "sglang-0.5.23")
VERSIONS = (*TELLING, "sglang-0.5.17")


class FakeServer:
    """One server on a port of loopback."""

    def __init__(
        self, flavour: str, *, step_s: float = 0.0, port: int = 0, has_plugin: bool = False
    ) -> None:
        """Starts it.

        Args:
            flavour: one of VERSIONS.
            port: 0: a free one.
            has_plugin: whether our plugin is in it, and takes weights.
        """
        self.has_plugin = has_plugin
        self.keeps_records = flavour == "vllm-0.25.1"
        self.kind, _, self.version = flavour.partition("-")
        self.has_spans = self.version in ("0.32.0", "0.5.23")
        self.core = MarkovServer(step_s=step_s)
        self.asked: list[Answer] = []  # bodies of generate requests
        self.called: list[str] = []  # control routes, with query
        self.heard: Counter[str] = Counter()  # requests that came in, by path
        self.spoil: Spoil | None = None  # of generate's answers
        self.statuses: list[int] = []  # of the next generate requests, instead of an answer
        self.ranks = self.replicas = 1  # what it says of its processes
        self.dies_of_loading = False
        self.hangs_of_loading = False
        self.is_stuck = False  # its engine hangs: the front end alone answers
        self.hangs = False  # generate never answers
        self.admits = True  # False: generate requests come in, and its engine does not know them
        self.breaks_off = False  # generate ends in the middle
        self.slow_routes: dict[str, float] = {}  # control route -> seconds
        self.broken_routes: dict[str, int] = {}  # control route -> status
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = port
        self._runner: web.AppRunner | None = None
        self._on_loop(self._start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """Everything is lost: connections, jobs, weights."""
        self._on_loop(self._stop())

    def kill_soon(self) -> None:
        """The same from within one of its own handlers."""
        threading.Thread(target=self.kill, daemon=True).start()

    @property
    def is_down(self) -> bool:
        """Whether it was killed and not started again."""
        return self._runner is None

    def restart(self) -> None:
        """On the same port, with random weights."""
        self._on_loop(self._start())

    def close(self) -> None:
        if self._runner is not None:
            self._on_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_DEADLINE_S)
        self._loop.close()

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_DEADLINE_S)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._note])
        routes_of = ROUTES[self.kind]
        self.is_stuck = False
        app.add_routes(routes_of(self).routes())
        if self.has_plugin:
            app.add_routes(FakePlugin(self.core).routes(self.kind))
        routes = app.router.routes()
        paths: Answer = {r.resource.canonical: {} for r in routes if r.resource}

        async def openapi(_: web.Request) -> web.Response:
            return web.json_response({"paths": paths})

        app.router.add_get("/openapi.json", openapi)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        self._listening = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listening.getsockname()[1]
        await web.SockSite(self._runner, self._listening).start()

    async def _stop(self) -> None:
        assert self._runner is not None
        # asyncio and aiohttp forget connections that are accepted while they shut down.
        self._loop.remove_reader(self._listening)
        for _ in range(_TICKS):
            await asyncio.sleep(0)
        for connection in self._runner.server.connections if self._runner.server else []:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self.core = MarkovServer(step_s=self.core.step_s)  # before anybody sees that it is down
        self._runner = None

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = request.path
        self.heard[path] += 1
        if path not in (
            "/generate",
            "/inference/v1/generate",
            "/health",
            "/openapi.json",
            "/metrics",
        ):
            self.called.append(request.path_qs)
        if self.dies_of_loading and path in _LOADING:
            self.dies_of_loading = False
            self.kill_soon()
            await asyncio.Event().wait()
        if self.hangs_of_loading and path in _LOADING:
            self.hangs_of_loading, self.is_stuck = False, True
        if self.is_stuck and path not in _FRONT:
            await asyncio.Event().wait()
        await asyncio.sleep(self.slow_routes.get(path, 0.0))
        if path in self.broken_routes:
            return web.json_response({"error": "out of order"}, status=self.broken_routes[path])
        return await handler(request)

    async def answer(self, request: web.Request, job: Job, shown: Callable[..., Answer]) -> Any:
        """The job's answer, spoiled if asked for."""
        body = await request.json()
        self.asked.append(body)
        if self.statuses:
            return web.json_response({"error": "no"}, status=self.statuses.pop(0))
        if self.hangs:
            await asyncio.Event().wait()
        while not self.admits:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(_STILL_S)
        async for _ in self.core.run(job):
            if self.breaks_off and len(job.token_ids) == 3:
                request.transport.abort()  # type: ignore[union-attr]
        return web.json_response(self._spoiled(shown(job)))

    def _spoiled(self, answer: Answer) -> Answer:
        return self.spoil(answer) if self.spoil else answer
