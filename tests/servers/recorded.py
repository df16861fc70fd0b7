"""A server's exchanges as a file: a proxy that writes them, and a stand-in that answers from them.

A file is JSON lines: a head (`tests.servers.replayed.head_of`: server, model, versions), then one
exchange a line: method, path, request, status, answer (JSON or text), and at last what the scenario
saw. What differs from run to run (ids, paths of folders) is written as a placeholder. The stand-in
fails a test that asks what was never recorded.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict, deque
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

_VARYING = ("rid", "request_id", "request_ids", "model_path", "weights_path", "extra_key")
_VARYING_MORE = ("cache_salt", "new_version")
Json = Any


def key_of(method: str, path: str, body: Json) -> str:
    """What makes two requests the same."""
    return json.dumps([method, path, _steady(body)], sort_keys=True)


def _steady(value: Json) -> Json:
    if isinstance(value, dict):
        varying = (*_VARYING, *_VARYING_MORE)
        return {k: f"<{k}>" if k in varying else _steady(v) for k, v in value.items()}
    return [_steady(v) for v in value] if isinstance(value, list) else value


class Served:
    """An aiohttp application on a loop of its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._wait(self._start())

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    def close(self) -> None:
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()


class Recorder(Served):
    """Passes everything on to `target` and writes it down."""

    def __init__(
        self, target: str, file: Path, head: Json, hidden: Mapping[str, str] | None = None
    ) -> None:
        """Args: hidden: what must not be told, such as a folder, and what stands there instead."""
        self._target = target
        self._file = file
        self._hidden = hidden or {}
        file.write_text(json.dumps(head) + "\n")
        super().__init__()

    def finish(self, seen: list[str]) -> None:
        """The scenario is over; what it saw is what a replay must see."""
        with self._file.open("a") as file:
            file.write(json.dumps({"seen": seen}) + "\n")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self._target + request.path_qs, data=content,
                headers={"Content-Type": "application/json"},
            ) as answer,
        ):  # fmt: skip
            kind = answer.headers.get("Content-Type", "text/plain").partition(";")[0]
            text = (await answer.read()).decode()
            self._write(request, content, answer.status, kind, text)
            return web.Response(status=answer.status, text=text, content_type=kind)

    def _write(
        self, request: web.Request, content: bytes, status: int, kind: str, text: str
    ) -> None:
        if request.path == "/health":
            return  # asked as often as there is time for
        row = {
            "method": request.method,
            "path": request.path_qs,
            "request": _steady(json.loads(content)) if content else None,
            "status": status,
            "kind": kind,
            "answer": self._told(request.path, text),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _told(self, path: str, text: str) -> str:
        """Of the description only what the adapter reads, the names of the routes: 17 kB of 365."""
        if path == "/openapi.json":
            return json.dumps({"paths": {route: {} for route in json.loads(text)["paths"]}})
        for secret, instead in self._hidden.items():
            text = text.replace(secret, instead)
        return text


class Replay(Served):
    """Answers as was recorded, equal requests in the order in which they were recorded.

    `unrecorded`: what was asked beyond it. A test fails if anything is in it, whatever became of
    the 500 that was answered.
    """

    def __init__(self, file: Path) -> None:
        self.head, *rows, last = map(json.loads, file.read_text().splitlines())
        assert "seen" in last, f"{file} ends early: its scenario was not finished"
        self.seen: list[str] = last["seen"]
        self.unrecorded: list[str] = []
        self._answers: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        for row in rows:
            self._answers[key_of(row["method"], row["path"], row["request"])].append(row)
        super().__init__()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/workers":  # of routers alone: no server's description lists it
            return web.Response(status=404)
        content = await request.read()
        key = key_of(request.method, request.path_qs, json.loads(content) if content else None)
        answers = self._answers.get(key)
        if not answers:
            self.unrecorded.append(key)
            return web.Response(status=500, text=f"never recorded: {key}")
        # The last one stays: a description may be asked for more often than it was then.
        row = answers.popleft() if len(answers) > 1 else answers[0]
        return web.Response(status=row["status"], text=row["answer"], content_type=row["kind"])
