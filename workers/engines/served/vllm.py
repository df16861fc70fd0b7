"""vLLM's words: token ids in and out by `POST /inference/v1/generate`.

Run with 0.25.1 and 0.32.0. Facts behind what looks odd here:
- The client's request id `x` is `generate-tokens-x` inside, and only that aborts it.
- 0.25.1 writes a log-prob's token as the text `token_id:7`, and has neither version nor abort
  route: our plugin's record of a request, in `kv_transfer_params`, has its versions.
- Log-probs cost a vLLM half of its speed, 16,750 tokens/s of 27,740 (H200, 1.7B): its API process
  makes an object of each. A request of which a record is kept asks for none.
- A log-prob that cannot be is written as -9999.
- `/pause?mode=keep` drops the KV cache of running requests unless `clear_cache=false`.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.facts import ServerFacts
from rlstreams.workers.engines.served.http import ServerError, ServerGoneError, ServerHttp
from rlstreams.workers.engines.served.wire import (
    Answer,
    AnswerError,
    GenerateRequest,
    field,
    float_array,
    spans_of,
)
from rlstreams.workers.weights.link.vllm_records import KEY as RECORD
from rlstreams.workers.weights.link.vllm_records import NAME_LABEL

_INNER_ID = "generate-tokens-{}"
_REASONS = frozenset({"stop", "length", "abort"})


class VllmDialect:
    """See `Adapter`."""

    generate_route = "/inference/v1/generate"
    alive = frozenset({200})  # 503: its engine core is dead

    async def keeps_records(self, http: ServerHttp, deadline_s: float) -> bool:
        """Where it is in the engine core that knows the method; else no worker does."""
        try:
            await _name(http, [], deadline_s)
        except ServerGoneError:
            raise
        except ServerError:
            return False
        return True

    def body(self, request: GenerateRequest, facts: ServerFacts) -> dict[str, Any]:
        """Everything is said: a default of the server could come from the model's folder."""
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
        }
        if facts.keeps_records:
            sampling["extra_args"] = {RECORD: True}
        else:
            sampling["logprobs"] = 0  # of the sampled token alone
        if request.experts_start:
            sampling["routed_experts_prompt_start"] = request.experts_start
        return {
            "request_id": request.request_id,
            "token_ids": list(request.token_ids),
            "sampling_params": sampling,
            "cache_salt": request.salt,
        }

    def answer(self, found: object) -> Answer:
        """The only choice of an answer."""
        choices = field(found, "choices", list)
        if len(choices) != 1:
            raise AnswerError(f"field choices should hold one choice, holds {len(choices)}")
        assert isinstance(found, dict)
        return _choice(choices[0], (found.get("kv_transfer_params") or {}).get(RECORD))

    async def pause(
        self, http: ServerHttp, mode: PauseMode, *, keep_cache: bool, deadline_s: float
    ) -> None:
        """`/pause`; new requests queue in the server until `/resume`."""
        clear = "false" if keep_cache and mode is PauseMode.KEEP else "true"
        query = f"mode={mode}&clear_cache={clear}"
        await http.post("/pause", None, deadline_s, what=f"pausing with mode {mode}", query=query)

    async def resume(self, http: ServerHttp, deadline_s: float) -> None:
        """`/resume`."""
        await http.post("/resume", None, deadline_s, what="resuming")

    async def abort(
        self, http: ServerHttp, facts: ServerFacts, request_id: str, deadline_s: float
    ) -> bool:
        """An empty list would abort everything, so exactly one id is sent."""
        if not facts.abort_route:
            return False
        body = {"request_ids": [_INNER_ID.format(request_id)]}
        await http.post(facts.abort_route, body, deadline_s, what=f"aborting {request_id}")
        return True

    async def set_label(
        self, http: ServerHttp, facts: ServerFacts, label: str, deadline_s: float
    ) -> None:
        """In our plugin's records, or by `/update_weight_version`; 0.25.1 has no such route."""
        if facts.keeps_records:
            await _name(http, [label], deadline_s)
        elif "/update_weight_version" in facts.routes:
            body = {"new_version": label}
            await http.post("/update_weight_version", body, deadline_s, what=f"naming {label}")

    async def load_folder(
        self, http: ServerHttp, facts: ServerFacts, folder: str, deadline_s: float
    ) -> None:
        """By `collective_rpc`: each of its workers runs `reload_weights`."""
        del facts
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await http.post("/collective_rpc", body, deadline_s, what=f"loading {folder}")


async def _name(http: ServerHttp, args: list[str], deadline_s: float) -> None:
    body = {"method": NAME_LABEL, "args": args}
    await http.post("/collective_rpc", body, deadline_s, what=f"naming {args}")


def _choice(choice: object, record: object) -> Answer:
    token_ids = field(choice, "token_ids", (list, type(None))) or []
    reason = field(choice, "finish_reason", str)
    if reason not in _REASONS:
        raise AnswerError(f"field finish_reason should be one of {sorted(_REASONS)}, is {reason!r}")
    assert isinstance(choice, dict)
    experts = choice.get("routed_experts")
    rows = None if experts is None else _experts(experts)
    if record is not None:
        return Answer(
            token_ids=token_ids,
            logprobs=float_array(field(record, "logprobs", str)),
            finish_reason=reason,
            spans=spans_of(field(record, "weight_versions", list)),
            num_preemptions=field(record, "num_preemptions", int),
            experts=rows,
        )
    if reason == "abort" and choice.get("logprobs") is None:
        token_ids, rows = [], None  # the API process ended it by itself: there is no record
    return Answer(
        token_ids=token_ids,
        logprobs=_logprobs(choice.get("logprobs"), token_ids),
        finish_reason=reason,
        spans=spans_of(choice.get("weight_versions")) if token_ids else None,
        experts=rows,
    )


def _logprobs(found: object, token_ids: list[int]) -> list[float]:
    """One per token, each beside the token that it belongs to."""
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
    """Base64 of the bytes of a `.npy` file: uint8 or uint16 [rows, layers, top_k]."""
    try:
        content = base64.b64decode(str(found), validate=True)
        rows: npt.NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as err:
        raise AnswerError(f"field routed_experts is no base64 of a .npy file: {err}") from err
    return rows
