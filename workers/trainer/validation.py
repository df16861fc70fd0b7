"""Whether a scored trajectory can be trained on at all: checked once, before it is admitted."""

from __future__ import annotations

import math

import numpy as np

from schemas.events import ScoredTrajectory, Segment, SegmentScore, Tensor

AUTHORS = ("prompt", "policy", "environment")
ANCHORS = ("sampled", "nearby", "behavior")
LOGPROB_ROUNDING = 1e-4  # how far above 0 a log-prob may lie, nats


def validate(scored: ScoredTrajectory, vocab_size: int) -> None:
    """Return if every number that the trainer will use is usable.

    Raises:
        ValueError: names the field, the index and the value: ids outside of the vocabulary,
            log-probs that are NaN, infinite or above 0 (1e-4 of rounding allowed), lengths that
            disagree, a reward that is not finite, scores that are not one per policy segment in
            order, an unknown author or anchor, a policy segment without a version or with
            temperature 0, no policy token, or a policy token with nothing before it.
    """
    trajectory = scored.trajectory
    if not math.isfinite(trajectory.reward):
        raise ValueError(f"reward must be finite, got {trajectory.reward}")
    if not 0 <= trajectory.sample < trajectory.group_size:
        raise ValueError(
            f"sample must be below group_size {trajectory.group_size}, got {trajectory.sample}"
        )
    for index, segment in enumerate(trajectory.segments):
        _check_segment(f"segments[{index}]", segment, vocab_size)
    _check_scores(scored)
    authors = [s.author for s in trajectory.segments if len(s.token_ids)]
    if "policy" not in authors:
        raise ValueError("segments: none by the policy has tokens")
    if authors[0] == "policy":
        raise ValueError("segments: the first token is the policy's, with nothing to condition on")


def _check_segment(name: str, segment: Segment, vocab_size: int) -> None:
    if segment.author not in AUTHORS:
        raise ValueError(f"{name}.author must be one of {AUTHORS}, got {segment.author!r}")
    ids = segment.token_ids.numpy()
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name}.token_ids must be integers [tokens], got {ids.dtype} {ids.shape}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"{name}.token_ids[{at}] must be below {vocab_size}, got {ids[at]}")
    if segment.author != "policy":
        return
    if segment.policy_version < 0:
        raise ValueError(f"{name}.policy_version must be 0 or above, got {segment.policy_version}")
    if not (math.isfinite(segment.temperature) and segment.temperature > 0):
        raise ValueError(
            f"{name}.temperature must be above 0 to train on, got {segment.temperature}"
        )
    if segment.behavior_logprobs is None:
        raise ValueError(f"{name}.behavior_logprobs is missing")
    _check_logprobs(f"{name}.behavior_logprobs", segment.behavior_logprobs, len(ids))


def _check_scores(scored: ScoredTrajectory) -> None:
    segments = scored.trajectory.segments
    expected = [i for i, segment in enumerate(segments) if segment.author == "policy"]
    actual = [score.segment for score in scored.scores]
    if expected != actual:
        raise ValueError(f"scores must be of the policy segments {expected}, got {actual}")
    for index, score in enumerate(scored.scores):
        name = f"scores[{index}]"
        if score.anchor not in ANCHORS:
            raise ValueError(f"{name}.anchor must be one of {ANCHORS}, got {score.anchor!r}")
        num_tokens = len(segments[score.segment].token_ids)
        _check_logprobs(f"{name}.proximal_logprobs", score.proximal_logprobs, num_tokens)
        _check_optional(name, score, num_tokens)


def _check_optional(name: str, score: SegmentScore, num_tokens: int) -> None:
    if score.reference_logprobs is not None:
        _check_logprobs(f"{name}.reference_logprobs", score.reference_logprobs, num_tokens)
    if score.entropy is not None and score.entropy.shape != (num_tokens,):
        raise ValueError(f"{name}.entropy must be [{num_tokens}], got {list(score.entropy.shape)}")


def _check_logprobs(name: str, tensor: Tensor, num_tokens: int) -> None:
    values = tensor.numpy()
    if values.shape != (num_tokens,) or values.dtype.kind != "f":
        raise ValueError(
            f"{name} must be floats [{num_tokens}], got {values.dtype} {list(values.shape)}"
        )
    unusable = np.flatnonzero(~(np.isfinite(values) & (values <= LOGPROB_ROUNDING)))
    if len(unusable):
        at = int(unusable[0])
        raise ValueError(f"{name}[{at}] must be finite and at most 0, got {values[at]}")
