"""`MarkovServer` behind the HTTP routes of vLLM 0.32.0 or 0.25.1, or of SGLang 0.5.17 or 0.5.23.

It runs on a loop of its own thread, as a server does. `misbehave` makes the next answers wrong in
one way; `kill` closes its port and breaks all connections.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from aiohttp import web

from tests.servers.markov import Job, MarkovServer
from workers.engines.fake import MAX_TOKENS

Answer = dict[str, Any]
Spoil = Callable[[Answer], Answer]
VERSIONS = ("vllm-0.32.0", "vllm-0.25.1", "sglang-0.5.23", "sglang-0.5.17")


class FakeServer:
    """One server on a port of loopback."""

    def __init__(self, flavour: str, *, step_s: float = 0.001) -> None:
        """Starts it.

        Args:
            flavour: one of VERSIONS.
        """
        self.kind, _, self.version = flavour.partition("-")
        self.has_spans = self.version in ("0.32.0", "0.5.23")
        self.core = MarkovServer(step_s=step_s)
        self.asked: list[Answer] = []  # bodies of generate requests
        self.called: list[str] = []  # control routes, with query
        self.spoil: Spoil | None = None  # of generate's answers
        self.statuses: list[int] = []  # of the next generate requests, instead of an answer
        self.hangs = False  # generate never answers
        self.breaks_off = False  # generate ends in the middle
        self.broken_routes: dict[str, int] = {}  # control route -> status
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._on_loop(self._start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """Everything is lost: connections, jobs, weights."""
        self._on_loop(self._stop())
        step_s = self.core.step_s
        self.core = MarkovServer(step_s=step_s)

    def restart(self) -> None:
        """On the same port, with random weights."""
        self._on_loop(self._start())

    def close(self) -> None:
        if self._runner is not None:
            self._on_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._note])
        app.add_routes(_vllm(self) if self.kind == "vllm" else _sglang(self))
        routes = app.router.routes()
        paths: Answer = {r.resource.canonical: {} for r in routes if r.resource}

        async def openapi(_: web.Request) -> web.Response:
            return web.json_response({"paths": paths})

        app.router.add_get("/openapi.json", openapi)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        assert self._runner is not None
        for connection in list(self._runner.server.connections) if self._runner.server else []:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = request.path
        if path not in ("/generate", "/inference/v1/generate", "/health", "/openapi.json"):
            self.called.append(request.path_qs)
        if path in self.broken_routes:
            return web.json_response({"error": "out of order"}, status=self.broken_routes[path])
        return await handler(request)  # type: ignore[no-any-return]

    async def answer(self, request: web.Request, job: Job, shown: Callable[..., Answer]) -> Any:
        """The job's answer, whole or streamed, spoiled if asked for."""
        body = await request.json()
        self.asked.append(body)
        if self.statuses:
            return web.json_response({"error": "no"}, status=self.statuses.pop(0))
        if self.hangs:
            await asyncio.Event().wait()
        if not body.get("stream"):
            async for _ in self.core.run(job):
                if self.breaks_off and len(job.token_ids) == 3:
                    request.transport.abort()  # type: ignore[union-attr]
            return web.json_response(self._spoiled(shown(job, 0, True)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        async for _ in self.core.run(job):
            if self.breaks_off and len(job.token_ids) == 3:
                request.transport.abort()  # type: ignore[union-attr]
                return response
            ended = job.finish_reason is not None
            if ended and self.version == "0.25.1" and len(job.token_ids) == sent:
                break  # a piece without a token is left out: the stream names no reason
            event = self._spoiled(shown(job, sent, ended))
            sent = len(job.token_ids)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _spoiled(self, answer: Answer) -> Answer:
        return self.spoil(answer) if self.spoil else answer


def _vllm(server: FakeServer) -> list[web.RouteDef]:
    core = server.core

    async def generate(request: web.Request) -> Any:
        body = await request.json()
        sampling = body["sampling_params"]
        job = Job(
            request_id=f"generate-tokens-{body['request_id']}",
            given=body["token_ids"],
            limit=sampling["max_tokens"],
            sampling=sampling,
            seed=sampling["seed"],
            eos_ids=set(sampling["stop_token_ids"]),
            experts_start=sampling.get("routed_experts_prompt_start", 0),
        )
        return await server.answer(request, job, shown)

    def shown(job: Job, sent: int, ended: bool) -> Answer:
        new = server.version == "0.32.0"
        content = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []}
            if new
            else {"token": f"token_id:{t}", "logprob": p, "top_logprobs": []}
            for t, p in zip(job.token_ids[sent:], job.logprobs[sent:], strict=True)
        ]
        choice: Answer = {
            "index": 0,
            "finish_reason": job.finish_reason,
            "token_ids": job.token_ids[sent:],
            "logprobs": {"content": content},
            "routed_experts": None,
        }
        if ended:
            choice["routed_experts"] = _npy(job.experts())
            if new:
                choice["weight_versions"] = job.spans()
        return {"request_id": job.request_id, "choices": [choice]}

    async def pause(request: web.Request) -> web.Response:
        core.paused = True
        if request.query["mode"] == "abort":
            for request_id in list(core.jobs):
                core.abort(request_id)
        return web.json_response({"status": "paused"})

    async def resume(_: web.Request) -> web.Response:
        core.paused = False
        return web.json_response({"status": "resumed"})

    async def abort(request: web.Request) -> web.Response:
        for request_id in (await request.json())["request_ids"]:
            core.abort(request_id)
        return web.json_response({"status": "aborted"})

    async def collective_rpc(request: web.Request) -> web.Response:
        core.load((await request.json())["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    async def update_label(request: web.Request) -> web.Response:
        core.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def weight_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": core.label})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": server.version})

    async def models(_: web.Request) -> web.Response:
        model = {"id": "m", "root": "/models/m", "max_model_len": MAX_TOKENS}
        return web.json_response({"data": [model]})

    routes = [
        web.post("/inference/v1/generate", generate),
        web.post("/pause", pause),
        web.post("/resume", resume),
        web.post("/collective_rpc", collective_rpc),
        web.get("/health", _fine),
        web.get("/version", version),
        web.get("/v1/models", models),
    ]
    if server.version == "0.32.0":
        routes += [
            web.post("/abort_requests", abort),
            web.post("/update_weight_version", update_label),
            web.get("/weight_info", weight_info),
        ]
    return routes


def _sglang(server: FakeServer) -> list[web.RouteDef]:
    core = server.core

    async def generate(request: web.Request) -> Any:
        body = await request.json()
        sampling = body["sampling_params"]
        job = Job(
            request_id=body["rid"],
            given=body["input_ids"],
            limit=sampling["max_new_tokens"],
            sampling=sampling,
            seed=sampling["sampling_seed"],
            eos_ids=set(sampling["stop_token_ids"]),
            experts_start=body.get("routed_experts_start_len"),
        )
        return await server.answer(request, job, shown)

    def shown(job: Job, sent: int, ended: bool) -> Answer:
        del sent  # pieces are cumulative
        pairs = zip(job.logprobs, job.token_ids, strict=True)
        meta: Answer = {
            "id": job.request_id,
            "finish_reason": {"type": job.finish_reason} if ended else None,
            "prompt_tokens": len(job.given),
            "completion_tokens": len(job.token_ids),
            "weight_version": core.label,
            "output_token_logprobs": [[p, t, None] for p, t in pairs],
        }
        if ended:
            raw = job.experts().astype("<i4").tobytes()
            meta["routed_experts"] = base64.b64encode(raw).decode()
            if server.has_spans:
                meta["weight_versions"] = job.spans()
        return {"output_ids": job.token_ids, "meta_info": meta}

    async def pause(request: web.Request) -> web.Response:
        core.paused = True
        if (await request.json())["mode"] == "abort":
            for request_id in list(core.jobs):
                core.abort(request_id)
        return web.json_response({"status": "ok"})

    async def resume(_: web.Request) -> web.Response:
        core.paused = False
        return web.json_response({"status": "ok"})

    async def abort(request: web.Request) -> web.Response:
        prefix = (await request.json())["rid"]
        for request_id in list(core.jobs):
            if request_id.startswith(prefix):
                core.abort(request_id)
        return web.Response()

    async def from_disk(request: web.Request) -> web.Response:
        core.load((await request.json())["model_path"])
        return web.json_response({"success": True, "message": "ok"})

    async def update_label(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        core.label = body["new_version"]
        return web.json_response({"success": True})

    async def info(_: web.Request) -> web.Response:
        found = {
            "version": server.version,
            "model_path": "/models/m",
            "context_length": MAX_TOKENS,
            "tp_size": 1,
        }
        return web.json_response(found)

    routes = [
        web.post("/generate", generate),
        web.post("/pause_generation", pause),
        web.post("/continue_generation", resume),
        web.post("/abort_request", abort),
        web.post("/update_weights_from_disk", from_disk),
        web.post("/update_weight_version", update_label),
        web.get("/health", _fine),
        web.get("/server_info", info),
    ]
    if server.has_spans:
        routes.append(web.post("/begin_weight_update", _fine))
    return routes


async def _fine(_: web.Request) -> web.Response:
    return web.Response()


def _npy(rows: np.ndarray[Any, Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()
