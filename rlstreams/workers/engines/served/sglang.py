"""SGLang's API: token ids in and out by its native `POST /generate`.

Run with 0.5.17; 0.5.23 was read only. Facts behind what looks odd here:
- One id outside the vocabulary ends the whole server: requests are checked before they come here.
- A request is aborted by the prefix of its id, so ids have a fixed length.
- Log-probs are of the distribution before top-p and top-k.
- Routed experts are raw int32 without a shape.
"""

from __future__ import annotations

from typing import Any

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.adapter import Adapter, Calls, StartOptions, Value
from rlstreams.workers.engines.served.facts import Kind, Needed, Ranks, ServerFacts, fields_at
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
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

_MODES = {PauseMode.KEEP: "in_place", PauseMode.ABORT: "abort"}
_LABEL_ROUTE, _BEGIN_ROUTE = "/update_weight_version", "/begin_weight_update"
_MEMORY = {"tags": ["kv_cache", "weights"]}


class SglangAdapter(Adapter):
    """See `Adapter`."""

    kind = Kind.SGLANG
    start = StartOptions(
        module="sglang.launch_server",
        distributions=("sglang",),
        model="model-path",
        limit="max-running-requests",
        log_level="log-level",
        plugin={"custom-weight-loader": payloads.SGLANG_LOADER},
        sleeps={"enable-memory-saver": True},
        reports_load={"enable-metrics": True},
        # Without it each look at its health would run a request of one token.
        environment={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
    )
    needed = (
        Needed(
            "control routes",
            ("/pause_generation", "/continue_generation", "/update_weight_version"),
            "weights cannot change safely",
            "a newer SGLang",
        ),
    )
    spread_flags = "--dp-size", "--pp-size"
    has_staged_ranks = False
    greeting = None  # only a description that it is asked for shows the plugin
    cures = "", ""
    generate_route = "/generate"
    # Its answers say how often they were retracted; `num_retracted_reqs` is of the moment.
    gauge_names = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "")
    alive = frozenset({200, 503})  # 503: it may be paused

    @staticmethod
    def is_behind(routes: frozenset[str]) -> bool:
        """By its native route."""
        return "/generate" in routes

    @classmethod
    async def describe(
        cls, http: ServerHttp, routes: frozenset[str], deadline_s: float
    ) -> ServerFacts:
        """Its start options are its settings."""
        found = await http.get(path := _info_route(routes), deadline_s)
        with fields_at(http.url, path):
            return ServerFacts(
                kind=cls.kind,
                version=str(found["version"]),
                model=str(found["model_path"]),
                max_tokens=int(found.get("max_req_input_len") or found["context_length"]),
                routes=routes,
                settings=found,
                reports_versions=_BEGIN_ROUTE in routes,
            )

    @staticmethod
    def answer_args(version: str) -> dict[str, Value]:
        """None but those of every kind."""
        return {}

    async def ranks(self, deadline_s: float, *, with_stages: bool = False) -> Ranks:
        """By its settings."""
        tensor, stages, replicas = (
            int(self.facts.settings.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")
        )
        return Ranks(total=tensor * stages * replicas, replicas=replicas, stages=stages)

    async def plugin(self, deadline_s: float) -> str:
        """Our loader among those that it was started with."""
        loaders = str(self.facts.settings.get("custom_weight_loader"))
        return loaders if "rlstreams_server" in loaders else ""

    def has_token_ids(self) -> bool | None:
        """With a tokenizer its answers are text."""
        return bool(self.facts.settings.get("skip_tokenizer_init"))

    def update_calls(self, order: str, num_ranks: int) -> Calls:
        """One call, which newer versions want between begin and end."""
        update = "/update_weights_from_tensor", payloads.sglang_update(order, num_ranks)
        if _BEGIN_ROUTE not in self.facts.routes:
            return [update]
        return [(_BEGIN_ROUTE, {}), update, ("/end_weight_update", {})]

    def body(self, request: GenerateRequest) -> dict[str, Any]:
        """Log-probs of output tokens alone."""
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": list(request.token_ids),
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": request.seed,
                "stop_token_ids": list(request.stop_token_ids),
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": request.salt,
        }
        if request.experts_start is not None:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.experts_start
        return body

    @staticmethod
    def answer(found: object) -> Answer:
        """Experts are flat: the caller knows layers and top-k."""
        token_ids = field(found, "output_ids", list)
        meta = field(found, "meta_info", dict)
        name = "routed_experts"
        experts = meta.get(name)
        return Answer(
            token_ids=token_ids,
            logprobs=_logprobs(meta, token_ids),
            finish_reason=reason_of(meta.get("finish_reason"), "type"),
            spans=spans_of(meta.get("weight_versions")),
            label=meta.get("weight_version"),
            num_preemptions=meta.get("num_retractions") or 0,
            experts=None if experts is None else array(decoded(experts, name), name, "<i4"),
        )

    async def pause(self, mode: PauseMode, *, keep_cache: bool, deadline_s: float = 0.0) -> None:
        """`retract` sends running requests back to the queue: they compute their cache again."""
        word = "retract" if mode is PauseMode.KEEP and not keep_cache else _MODES[mode]
        what = f"pausing with mode {word}"
        await self._post("/pause_generation", {"mode": word}, what, deadline_s)

    @property
    def engine_route(self) -> str:
        """`/server_info` asks the scheduler for its state."""
        return _info_route(self.facts.routes)

    async def resume(self) -> None:
        """`/continue_generation`."""
        await self._post("/continue_generation", {}, "resuming")

    async def abort(self, request_id: str) -> bool:
        """Abort by id; `abort_all` is sent because versions took its absence differently."""
        body = {"rid": request_id, "abort_all": False}
        await self._post("/abort_request", body, f"aborting {request_id}")
        return True

    async def set_label(self, label: str) -> None:
        """Set the version's name; by default this route aborts every request."""
        if _LABEL_ROUTE not in self.facts.routes:
            raise ServerError(
                f"server {self.http.url} ({self.facts.name}) has no route {_LABEL_ROUTE}: "
                "the version of a sampled token would be unknown"
            )
        body = {"new_version": label, "abort_all_requests": False}
        await self._post(_LABEL_ROUTE, body, f"naming {label}")

    async def sleep(self, deadline_s: float) -> None:
        """`/release_memory_occupation`, which the server refuses while a request runs."""
        await self._post("/release_memory_occupation", _MEMORY, "going to sleep", deadline_s)

    async def wake(self, deadline_s: float) -> None:
        """`/resume_memory_occupation`."""
        await self._post("/resume_memory_occupation", _MEMORY, "waking up", deadline_s)

    async def load_folder(self, folder: str, deadline_s: float) -> None:
        """Load by `/update_weights_from_disk`: a failed one keeps the old weights."""
        body, what = {"model_path": folder, "flush_cache": False}, f"loading {folder}"
        found = await self._post("/update_weights_from_disk", body, what, deadline_s)
        if not (isinstance(found, dict) and found.get("success")):
            raise ServerError(f"server {self.http.url}: {what}: {found!r:.300}")


def _info_route(routes: frozenset[str]) -> str:
    return "/server_info" if "/server_info" in routes else "/get_server_info"


def _logprobs(meta: dict[str, Any], token_ids: list[int]) -> list[float]:
    """Log-probs of the output tokens; entries are `[logprob, token_id, text or null]`."""
    entries = field(meta, "output_token_logprobs", list) if token_ids else []
    if len(entries) != len(token_ids):
        raise AnswerError(
            f"field output_token_logprobs has {len(entries)} entries for {len(token_ids)} tokens"
        )
    for position, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        is_pair = isinstance(entry, list) and len(entry) >= 2 and entry[1] == token_id
        if not is_pair or not isinstance(entry[0], (int, float)):  # null stands for NaN
            raise AnswerError(
                f"field output_token_logprobs[{position}] should be of token {token_id}, "
                f"is {entry!r:.60}"
            )
    return [entry[0] for entry in entries]
