"""The engine's answer to one call, cut behind the stop string that ends it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlstreams.schemas.events import Segment, Tensor
from rlstreams.workers.engines.base import FinishReason, GeneratedSegment, Sampling

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The sampled answer to one call."""

    segments: tuple[GeneratedSegment, ...]
    num_prompt: int  # tokens before the answer
    attempt: int
    stopped_by: str = ""  # the stop string that ends it

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the answer."""
        return [token for segment in self.segments for token in segment.token_ids.tolist()]

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled the answer."""
        return {segment.policy_version for segment in self.segments}

    @property
    def is_cut(self) -> bool:
        """Whether neither the policy nor a stop string ended the answer."""
        return not self.stopped_by and self.segments[-1].finish_reason is not FinishReason.STOP

    def events(self, load_ids: Callable[[int], str], sampling: Sampling) -> tuple[Segment, ...]:
        """The segments in the log's form.

        Args:
            load_ids: from a version to the id of the load by which the engine came to hold it.
        """
        return tuple(
            Segment(
                author="policy",
                token_ids=Tensor.of(segment.token_ids.astype(np.int32, copy=False)),
                policy_version=segment.policy_version,
                weight_hash=segment.weight_hash,
                load_id=load_ids(segment.policy_version),
                behavior_logprobs=Tensor.of(segment.logprobs.astype(np.float32, copy=False)),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                finish_reason=segment.finish_reason,
            )
            for segment in self.segments
        )


def sampled_of(
    segments: Sequence[GeneratedSegment],
    num_prompt: int,
    attempt: int,
    stop: Sequence[str],
    decode: Decode,
) -> Sampled:
    """The answer up to and with the token that completes a stop string.

    Tokens behind it are dropped: the caller never received them, so nothing can be learnt from
    them. An engine that stops by itself would have made the same tokens up to there.
    """
    segments = [one for one in segments if len(one.token_ids)] or list(segments[-1:])
    ids = [token for segment in segments for token in segment.token_ids.tolist()]
    text = decode(ids)
    if not any(word in text for word in stop):
        return Sampled(segments=tuple(segments), num_prompt=num_prompt, attempt=attempt)
    low, high = 1, len(ids)  # the first `high` tokens hold a stop string, the first `low - 1` none
    while low < high:
        middle = (low + high) // 2
        has = any(word in decode(ids[:middle]) for word in stop)
        low, high = (low, middle) if has else (middle + 1, high)
    text = decode(ids[:low])
    return Sampled(
        segments=tuple(_first(segments, low)),
        num_prompt=num_prompt,
        attempt=attempt,
        stopped_by=stop_of(text, stop),
    )


def stop_of(text: str, stop: Sequence[str]) -> str:
    """The stop string that comes first in an answer's text; "": none does."""
    return min((word for word in stop if word in text), key=text.index, default="")


def _first(segments: Sequence[GeneratedSegment], num: int) -> list[GeneratedSegment]:
    found: list[GeneratedSegment] = []
    for segment in segments:
        if num > 0:
            found.append(
                replace(segment, token_ids=segment.token_ids[:num], logprobs=segment.logprobs[:num])
            )
            num -= len(segment.token_ids)
    return [*found[:-1], replace(found[-1], finish_reason=FinishReason.STOP)]
