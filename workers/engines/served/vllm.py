"""vLLM's words: token ids in and out by `POST /inference/v1/generate`.

Run with 0.25.1 and 0.32.0. Facts behind what looks odd here:
- The client's request id `x` is `generate-tokens-x` inside, and only that aborts it.
- 0.25.1 writes a log-prob's token as the text `token_id:7`, and has neither version nor abort
  route.
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
from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.wire import (
    Answer,
    AnswerError,
    GenerateRequest,
    field,
    spans_of,
)

_INNER_ID = "generate-tokens-{}"
_REASONS = frozenset({"stop", "length", "abort"})


class VllmDialect:
    """See `Dialect`."""

    generate_route = "/inference/v1/generate"
    alive = frozenset({200})  # 503: its engine core is dead

    def body(self, request: GenerateRequest, *, stream: bool) -> dict[str, Any]:
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
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        if request.experts_start:
            sampling["routed_experts_prompt_start"] = request.experts_start
        return {
            "request_id": request.request_id,
            "token_ids": list(request.token_ids),
            "sampling_params": sampling,
            "cache_salt": request.salt,
            "stream": stream,
        }

    def answer(self, found: object) -> Answer:
        """The only choice of an answer."""
        choices = field(found, "choices", list)
        if len(choices) != 1:
            raise AnswerError(f"field choices should hold one choice, holds {len(choices)}")
        return _choice(choices[0])

    def piece(self, found: object, received: int) -> Answer:
        """The deltas of an event; an error is an event too, with the HTTP status still 200."""
        del received
        if isinstance(found, dict) and found.get("error"):
            raise AnswerError(f"the stream reports an error: {found['error']!r:.200}")
        choices = field(found, "choices", list)
        return _choice(choices[0]) if choices else Answer(token_ids=(), logprobs=())

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
        """`/update_weight_version`; 0.25.1 has none."""
        if "/update_weight_version" in facts.routes:
            body = {"new_version": label}
            await http.post("/update_weight_version", body, deadline_s, what=f"naming {label}")

    async def load_folder(
        self, http: ServerHttp, facts: ServerFacts, folder: str, deadline_s: float
    ) -> None:
        """By `collective_rpc`: each of its workers runs `reload_weights`."""
        del facts
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await http.post("/collective_rpc", body, deadline_s, what=f"loading {folder}")


def _choice(choice: object) -> Answer:
    token_ids = field(choice, "token_ids", (list, type(None))) or []
    reason = field(choice, "finish_reason", (str, type(None)))
    if reason is not None and reason not in _REASONS:
        raise AnswerError(f"field finish_reason should be one of {sorted(_REASONS)}, is {reason!r}")
    assert isinstance(choice, dict)
    experts = choice.get("routed_experts")
    return Answer(
        token_ids=token_ids,
        logprobs=_logprobs(choice.get("logprobs"), token_ids),
        finish_reason=reason,
        spans=spans_of(choice.get("weight_versions")),
        experts=None if experts is None else _experts(experts),
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
