"""From a server's answer to segments: an impossible field is refused, the rest is cut. Pure.

A version is a label that we gave the server when it took the weights. A label that we never gave
means that the server was restarted or that somebody else changed its weights: nothing of such an
answer is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.workers.engines.base import Experts, FinishReason, GeneratedSegment, Held
from rlstreams.workers.engines.served.shape import ModelShape
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, Span

_SHOWN = 4  # newest labels in a message
# Sampling in bfloat16 may round a probability of 1 up; -9999 is vLLM's word for "cannot be".
_MAX_LOGPROB, _MIN_LOGPROB = 1e-3, -9998.0


class UnknownVersionError(AnswerError):
    """Tokens came from weights that this process did not load."""


def checked_tokens(
    answer: Answer, request: GenerateRequest, shape: ModelShape
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Ids and log-probs, checked as the end is; an AnswerError names field and position."""
    num_tokens = len(answer.token_ids)
    if len(answer.logprobs) != num_tokens:
        raise AnswerError(f"logprobs has {len(answer.logprobs)} entries for {num_tokens} tokens")
    if num_tokens > request.max_new_tokens:
        raise AnswerError(
            f"token_ids has {num_tokens} tokens, at most {request.max_new_tokens} were asked for"
        )
    ids, logprobs = np.asarray(answer.token_ids), np.asarray(answer.logprobs)
    is_id = ids.dtype.kind == "i" and (ids >= 0) & (ids < shape.vocab_size)
    if num_tokens and not np.all(is_id):
        position = int(np.argmin(is_id)) if ids.dtype.kind == "i" else _first_not_int(answer)
        raise AnswerError(
            f"token_ids[{position}] = {answer.token_ids[position]!r} is outside the vocabulary of "
            f"{shape.vocab_size}"
        )
    is_logprob = (logprobs > _MIN_LOGPROB) & (logprobs <= _MAX_LOGPROB)  # False of a NaN
    if not np.all(is_logprob):
        position = int(np.argmin(is_logprob))
        raise AnswerError(f"logprobs[{position}] = {float(logprobs[position])!r} is no log-prob")
    if answer.finish_reason == "stop" and (
        not num_tokens or answer.token_ids[-1] not in shape.eos_ids
    ):
        last = answer.token_ids[-1] if num_tokens else None
        raise AnswerError(
            f"finish_reason is stop, but the last token {last} is none of {sorted(shape.eos_ids)}"
        )
    return ids, logprobs


def _first_not_int(answer: Answer) -> int:
    return next((p for p, one in enumerate(answer.token_ids) if type(one) is not int), 0)


def check_spans(spans: Sequence[Span], num_tokens: int) -> None:
    """Check that spans cover the tokens once, in order; else an AnswerError."""
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            raise AnswerError(
                f"weight_versions: span {span.start} to {span.end} follows token {end}"
            )
        end = span.end
    if end != num_tokens:
        raise AnswerError(f"weight_versions end at token {end} of {num_tokens}")


def expert_rows(
    found: npt.NDArray[Any], request: GenerateRequest, num_tokens: int, shape: ModelShape
) -> Experts:
    """Routed experts [rows, layers with a router, top_k], from position `experts_start` on.

    Raises:
        AnswerError: wrong shape, an expert that is not there, or one twice in a row's top-k.
    """
    assert request.experts_start is not None
    rows = max(0, len(request.token_ids) + num_tokens - 1 - request.experts_start)
    wanted = (rows, shape.num_layers, shape.top_k)
    if found.ndim == 1 and found.size == math.prod(wanted):
        found = found.reshape(wanted)
    if found.shape != wanted:
        raise AnswerError(f"routed_experts has shape {found.shape}, should be {wanted}")
    if found.dtype.kind not in "iu":
        raise AnswerError(f"routed_experts is {found.dtype}, should be integers")
    chosen = found[:, list(shape.moe_layers), :]
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < shape.num_experts:
        raise AnswerError(
            f"routed_experts holds expert {int(chosen.min())} to {int(chosen.max())}, the model "
            f"has {shape.num_experts}"
        )
    ordered = np.sort(chosen, -1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2)) if chosen.size else []
    if np.any(twice):
        raise AnswerError(
            f"routed_experts: row {int(np.argmax(twice))} names an expert twice in its top "
            f"{shape.top_k}"
        )
    if shape.num_experts <= 256:
        return chosen.astype(np.uint8)
    return chosen.astype(np.uint16)


def cut(
    answer: Answer,
    spans: Sequence[Span],
    request: GenerateRequest,
    shape: ModelShape,
    labels: Mapping[str, Held],
) -> list[GeneratedSegment]:
    """The answer's segments, one per span; the last one says why the answer ended.

    Args:
        spans: of tokens, each with its version.
        labels: the versions that this server was given.

    Raises:
        AnswerError: an impossible field.
        UnknownVersionError: a version that the server was not given.
    """
    ids, logprobs = checked_tokens(answer, request, shape)
    check_spans(spans, len(answer.token_ids))
    unknown = [span.label for span in spans if span.label not in labels]
    if unknown:
        raise UnknownVersionError(
            f"tokens come from version {unknown[0]!r}, but it was given {list(labels)[-_SHOWN:]}"
        )
    experts = None
    # After a preemption the rows of tokens before a pull are of the new weights: none is kept then.
    is_mixed = answer.num_preemptions > 0 and len(spans) > 1
    if answer.experts is not None and request.experts_start is not None and not is_mixed:
        experts = expert_rows(answer.experts, request, len(answer.token_ids), shape)
    ends = FinishReason(answer.finish_reason)
    kept = [span for span in spans if span.end > span.start] or list(spans[-1:])
    segments, row = [], 0
    for number, span in enumerate(kept):
        # A token's row is made when the next one is sampled: the last token of all has none.
        last_row = row
        if experts is not None and request.experts_start is not None:
            last_row = min(
                len(experts), len(request.token_ids) + span.end - 1 - request.experts_start
            )
        segments.append(
            GeneratedSegment(
                token_ids=np.array(ids[span.start : span.end], np.int32),
                logprobs=np.array(logprobs[span.start : span.end], np.float32),
                policy_version=labels[span.label].policy_version,
                weight_hash=labels[span.label].weight_hash,
                finish_reason=ends if number + 1 == len(kept) else FinishReason.POLICY_CHANGED,
                routed_experts=None if experts is None else experts[row:last_row],
                routed_experts_start=(request.experts_start or 0) + row,
            )
        )
        row = last_row
    return segments


def empty_segment(held: Held, reason: FinishReason) -> GeneratedSegment:
    """The answer to a request that was never sent."""
    return GeneratedSegment(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_version=held.policy_version,
        weight_hash=held.weight_hash,
        finish_reason=reason,
    )
