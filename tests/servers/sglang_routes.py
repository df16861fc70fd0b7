"""The routes of SGLang 0.5.23 and 0.5.17, as far as the adapter calls them."""

from __future__ import annotations

import base64
from typing import Any

from aiohttp import web

from tests.fake_engine import MAX_TOKENS
from tests.servers.host import Answer, Host
from tests.servers.markov import Job
from tests.servers.vllm_routes import fine


class SglangRoutes:
    """Words and answers of SGLang."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._core = server.core

    async def generate(self, request: web.Request) -> Any:
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
        return await self._server.answer(request, job, self._shown)

    def _shown(self, job: Job) -> Answer:
        pairs = zip(job.logprobs, job.token_ids, strict=True)
        meta: Answer = {
            "id": job.request_id,
            "finish_reason": {"type": job.finish_reason},
            "prompt_tokens": len(job.given),
            "completion_tokens": len(job.token_ids),
            "weight_version": self._core.label,
            "output_token_logprobs": [[p, t, None] for p, t in pairs],
        }
        raw = job.experts().astype("<i4").tobytes()
        meta["routed_experts"] = base64.b64encode(raw).decode()
        if self._server.has_spans:
            meta["weight_versions"] = job.spans()
        return {"output_ids": job.token_ids, "meta_info": meta}

    async def pause(self, request: web.Request) -> web.Response:
        self._core.pause(aborts=(await request.json())["mode"] == "abort")
        return web.json_response({"status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        self._core.paused = False
        return web.json_response({"status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        prefix = (await request.json())["rid"]
        for request_id in list(self._core.jobs):
            if request_id.startswith(prefix):
                self._core.abort(request_id)
        return web.Response()

    async def from_disk(self, request: web.Request) -> web.Response:
        self._core.load((await request.json())["model_path"])
        return web.json_response({"success": True, "message": "ok"})

    async def update_label(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        self._core.label = body["new_version"]
        return web.json_response({"success": True})

    async def info(self, _: web.Request) -> web.Response:
        found = {
            "version": self._server.version,
            "model_path": "/models/m",
            "context_length": MAX_TOKENS,
            "tp_size": self._server.ranks // self._server.replicas,
            "dp_size": self._server.replicas,
        }
        return web.json_response(found)

    async def release(self, request: web.Request) -> web.Response:
        assert set((await request.json())["tags"]) == {"weights", "kv_cache"}
        self._core.sleep()
        return web.json_response(None)

    async def resume_memory(self, _: web.Request) -> web.Response:
        self._core.is_asleep = False
        return web.json_response(None)

    async def metrics(self, _: web.Request) -> web.Response:
        core, labels = self._core, '{model_name="m",tp_rank="0"}'
        lines = [
            f"sglang:num_running_reqs{labels} {float(len(core.jobs))}",
            f"sglang:num_queue_reqs{labels} {float(core.num_waiting)}",
            f"sglang:token_usage{labels} {core.cache_share}",
        ]
        return web.Response(text="\n".join(lines))

    def routes(self) -> list[web.RouteDef]:
        routes = [
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/abort_request", self.abort),
            web.post("/update_weights_from_disk", self.from_disk),
            web.post("/update_weight_version", self.update_label),
            web.get("/health", fine),
            *([web.get("/metrics", self.metrics)] if self._server.has_spans else []),
            web.get("/server_info", self.info),
            web.post("/release_memory_occupation", self.release),
            web.post("/resume_memory_occupation", self.resume_memory),
        ]
        if self._server.has_spans:
            routes.append(web.post("/begin_weight_update", fine))
        return routes
