"""SGLang's words: token ids in and out by its native `POST /generate`.

Run with 0.5.17; 0.5.23 was read only. Facts behind what looks odd here:
- One id outside the vocabulary ends the whole server: requests are checked before they come here.
- A request is aborted by the prefix of its id, so ids have a fixed length.
- Log-probs are of the distribution before top-p and top-k.
- Routed experts are raw int32 without a shape.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy.typing as npt

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.facts import ServerFacts
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.wire import (
    Answer,
    AnswerError,
    GenerateRequest,
    field,
    int_array,
    spans_of,
)

_MODES = {PauseMode.KEEP: "in_place", PauseMode.ABORT: "abort"}
_REASONS = frozenset({"stop", "length", "abort"})


class SglangDialect:
    """See `Adapter`."""

    generate_route = "/generate"
    alive = frozenset({200, 503})  # 503: it may be paused

    async def keeps_records(self, http: ServerHttp, deadline_s: float) -> bool:
        """There is no such plugin."""
        return False

    def body(self, request: GenerateRequest, facts: ServerFacts) -> dict[str, Any]:
        """Everything is said: a default of the server could come from the model's folder."""
        del facts
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
            "logprob_start_len": -1,  # of output tokens alone
            "extra_key": request.salt,
        }
        if request.experts_start is not None:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.experts_start
        return body

    def answer(self, found: object) -> Answer:
        """A whole answer."""
        token_ids = field(found, "output_ids", list)
        meta = field(found, "meta_info", dict)
        experts = meta.get("routed_experts")
        return Answer(
            token_ids=token_ids,
            logprobs=_logprobs(meta, token_ids),
            finish_reason=_reason(meta.get("finish_reason")),
            spans=spans_of(meta.get("weight_versions")),
            label=meta.get("weight_version"),
            num_preemptions=meta.get("num_retractions") or 0,
            experts=None if experts is None else _experts(experts),
        )

    async def pause(
        self, http: ServerHttp, mode: PauseMode, *, keep_cache: bool, deadline_s: float
    ) -> None:
        """`retract` sends running requests back to the queue: they compute their cache again."""
        word = "retract" if mode is PauseMode.KEEP and not keep_cache else _MODES[mode]
        body = {"mode": word}
        await http.post("/pause_generation", body, deadline_s, what=f"pausing with mode {word}")

    async def resume(self, http: ServerHttp, deadline_s: float) -> None:
        """`/continue_generation`."""
        await http.post("/continue_generation", {}, deadline_s, what="resuming")

    async def abort(
        self, http: ServerHttp, facts: ServerFacts, request_id: str, deadline_s: float
    ) -> bool:
        """By id; `abort_all` is said because its absence was read differently by versions."""
        del facts
        body = {"rid": request_id, "abort_all": False}
        await http.post("/abort_request", body, deadline_s, what=f"aborting {request_id}")
        return True

    async def set_label(
        self, http: ServerHttp, facts: ServerFacts, label: str, deadline_s: float
    ) -> None:
        """By default this route aborts every request."""
        if "/update_weight_version" not in facts.routes:
            raise ServerError(
                f"server {http.url} ({facts.name}) has no route /update_weight_version: "
                "which version sampled a token could not be told"
            )
        body = {"new_version": label, "abort_all_requests": False}
        await http.post("/update_weight_version", body, deadline_s, what=f"naming {label}")

    async def load_folder(
        self, http: ServerHttp, facts: ServerFacts, folder: str, deadline_s: float
    ) -> None:
        """`/update_weights_from_disk`: it keeps the old weights if that fails."""
        del facts
        body = {"model_path": folder, "flush_cache": False}
        path = "/update_weights_from_disk"
        found = await http.post(path, body, deadline_s, what=f"loading {folder}")
        if not (isinstance(found, dict) and found.get("success")):
            raise ServerError(f"server {http.url}: loading {folder}: {found!r:.300}")


def _reason(found: object) -> str:
    reason = str(field(found, "type", str))
    if reason not in _REASONS:
        raise AnswerError(f"field finish_reason.type should be {sorted(_REASONS)}, is {reason!r}")
    return reason


def _logprobs(meta: dict[str, Any], token_ids: list[int]) -> list[float]:
    """Entries are `[logprob, token_id, text or null]`, of the same tokens as `output_ids`."""
    entries = field(meta, "output_token_logprobs", list) if token_ids else []
    if len(entries) != len(token_ids):
        raise AnswerError(
            f"field output_token_logprobs has {len(entries)} entries for {len(token_ids)} tokens"
        )
    for position, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        is_pair = isinstance(entry, list) and len(entry) >= 2 and entry[1] == token_id
        if not is_pair or not isinstance(entry[0], (int, float)):  # null: it was a NaN
            raise AnswerError(
                f"field output_token_logprobs[{position}] should be of token {token_id}, "
                f"is {entry!r:.60}"
            )
    return [entry[0] for entry in entries]


def _experts(found: object) -> npt.NDArray[Any]:
    """Base64 of int32, flat: the caller knows layers and top-k."""
    try:
        content = base64.b64decode(str(found), validate=True)
    except ValueError as err:
        raise AnswerError(f"field routed_experts is no base64: {err}") from err
    return int_array(content, "<i4")
