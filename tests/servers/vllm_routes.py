"""The routes of vLLM 0.32.0 and 0.25.1, as far as the adapter calls them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from aiohttp import web

from rlstreams.workers.weights.link.vllm_records import KEY, NAME_LABEL
from tests.fake_engine import MAX_TOKENS
from tests.servers.host import Answer, Host
from tests.servers.markov import Job


class VllmRoutes:
    """Words and answers of vLLM."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._core = server.core

    async def generate(self, request: web.Request) -> Any:
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
        return await self._server.answer(request, job, self._shown)

    def _shown(self, job: Job) -> Answer:
        new = self._server.version == "0.32.0"
        choice: Answer = {
            "index": 0,
            "finish_reason": job.finish_reason,
            "token_ids": job.token_ids,
            "logprobs": None,
            "routed_experts": npy(job.experts()),
        }
        if new:
            choice["weight_versions"] = job.spans()
        answer: Answer = {"request_id": job.request_id, "choices": [choice]}
        if (job.sampling.get("extra_args") or {}).get(KEY):
            logprobs = np.array(job.logprobs, "<f4").tobytes()
            record = {
                "logprobs": base64.b64encode(logprobs).decode(),
                "weight_versions": job.spans(),
                "num_preemptions": 0,
            }
            return answer | {"kv_transfer_params": {KEY: record}}
        choice["logprobs"] = {
            "content": [
                {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []}
                if new
                else {"token": f"token_id:{t}", "logprob": p, "top_logprobs": []}
                for t, p in zip(job.token_ids, job.logprobs, strict=True)
            ]
        }
        return answer

    async def pause(self, request: web.Request) -> web.Response:
        self._core.pause(aborts=request.query["mode"] == "abort")
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self._core.paused = False
        return web.json_response({"status": "resumed"})

    async def abort(self, request: web.Request) -> web.Response:
        for request_id in (await request.json())["request_ids"]:
            self._core.abort(request_id)
        return web.json_response({"status": "aborted"})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == NAME_LABEL:
            if not self._server.keeps_records:
                return web.json_response({"error": "no worker has this method"}, status=500)
            self._core.label = body["args"][0] if body["args"] else self._core.label
            return web.json_response({"results": ["True"]})
        self._core.load(body["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    async def update_label(self, request: web.Request) -> web.Response:
        self._core.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._core.label})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self._server.version})

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": "m", "root": "/models/m", "max_model_len": MAX_TOKENS}
        return web.json_response({"data": [model]})

    async def world_size(self, request: web.Request) -> web.Response:
        is_whole = request.query["include_dp"] == "true"
        replicas = 1 if is_whole else self._server.replicas
        return web.json_response({"world_size": self._server.ranks // replicas})

    async def metrics(self, _: web.Request) -> web.Response:
        core, labels = self._core, '{engine="0",model_name="m"}'
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {float(len(core.jobs))}",
            f"vllm:num_requests_waiting{labels} {float(core.num_waiting)}",
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0',
            f"vllm:kv_cache_usage_perc{labels} {core.cache_share}",
            f"vllm:num_preemptions_total{labels} {float(core.num_preemptions)}",
            f"vllm:num_preemptions_created{labels} 1.79e+09",
        ]
        return web.Response(text="\n".join(lines))

    async def sleep(self, request: web.Request) -> web.Response:
        assert request.query["level"] == "2"
        self._core.sleep()
        return web.Response()

    async def wake_up(self, _: web.Request) -> web.Response:
        self._core.is_asleep = self._core.paused = False
        return web.Response()

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._core.is_asleep})

    async def server_info(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        return web.json_response(
            {"vllm_config": {"parallel_config": {"pipeline_parallel_size": 1}}}
        )

    def routes(self) -> list[web.RouteDef]:
        routes = [
            web.post("/inference/v1/generate", self.generate),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.post("/collective_rpc", self.collective_rpc),
            web.get("/health", fine),
            web.get("/metrics", self.metrics),
            web.get("/get_world_size", self.world_size),
            web.get("/version", self.version),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.get("/server_info", self.server_info),
            web.get("/v1/models", self.models),
        ]
        if self._server.version == "0.32.0":
            routes += [
                web.post("/abort_requests", self.abort),
                web.post("/update_weight_version", self.update_label),
                web.get("/weight_info", self.weight_info),
            ]
        return routes


async def fine(_: web.Request) -> web.Response:
    return web.Response()


def npy(rows: np.ndarray[Any, Any]) -> str:
    """Rows as vLLM writes them: an `.npy` file in base64."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()
