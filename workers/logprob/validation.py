"""Whether a trajectory can be scored. Pure."""

from __future__ import annotations

import numpy as np

from schemas.events import NO_VERSION, Segment, Trajectory

AUTHORS = ("prompt", "policy", "environment")
LOGPROB_SLACK = 1e-4  # rounding may put a certain token's log-prob this far above 0


def validate(trajectory: Trajectory, vocab_size: int, max_tokens: int) -> None:
    """Check everything that scoring and training rely on.

    Raises:
        ValueError: names the sample, the field, the place and the value.
    """
    name = f"trajectory {trajectory.group_id}/{trajectory.sample}"
    if not np.isfinite(trajectory.reward):
        raise ValueError(f"{name}: reward is {trajectory.reward}")
    if not any(s.author == "policy" and len(s.token_ids) for s in trajectory.segments):
        raise ValueError(f"{name}: segments hold no token by the policy")
    for index, segment in enumerate(trajectory.segments):
        _validate_segment(f"{name}: segments[{index}]", segment, vocab_size)
    num_tokens = sum(len(s.token_ids) for s in trajectory.segments)
    if num_tokens > max_tokens:
        raise ValueError(f"{name}: {num_tokens} tokens, the scorer takes {max_tokens}")
    if trajectory.routed_experts is not None:
        _validate_experts(name, trajectory, num_tokens - 1)


def _validate_segment(name: str, segment: Segment, vocab_size: int) -> None:
    if segment.author not in AUTHORS:
        raise ValueError(f"{name}.author is {segment.author!r}, one of {AUTHORS} is meant")
    ids = segment.token_ids.numpy()
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise ValueError(f"{name}.token_ids is {ids.dtype} {ids.shape}, int32 [tokens] is meant")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(f"{name}.token_ids[{at}] is {ids[at]}, the vocabulary has {vocab_size}")
    if segment.author != "policy":
        return
    if segment.policy_version <= NO_VERSION:
        raise ValueError(f"{name}.policy_version is {segment.policy_version}")
    if segment.behavior_logprobs is None:
        raise ValueError(f"{name}.behavior_logprobs is missing")
    logprobs = segment.behavior_logprobs.numpy()
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"{name}.behavior_logprobs has shape {logprobs.shape}, token_ids {ids.shape}"
        )
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > LOGPROB_SLACK))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(f"{name}.behavior_logprobs[{at}] is {logprobs[at]}")


def _validate_experts(name: str, trajectory: Trajectory, num_rows: int) -> None:
    assert trajectory.routed_experts is not None
    shape = trajectory.routed_experts.shape
    if len(shape) != 3 or shape[0] != num_rows:
        raise ValueError(f"{name}: routed_experts has shape {shape}, [{num_rows}, layers, top_k]")
    if trajectory.routed_experts.dtype not in ("uint8", "uint16"):
        raise ValueError(f"{name}: routed_experts is {trajectory.routed_experts.dtype}")
    ranked = np.sort(trajectory.routed_experts.numpy(), axis=-1)
    twice = np.argwhere(ranked[..., 1:] == ranked[..., :-1])
    mask = trajectory.routed_experts_mask
    recorded = mask.numpy().astype(bool) if mask is not None else np.ones(num_rows, bool)
    twice = twice[recorded[twice[:, 0]]]
    if len(twice):
        row, layer = int(twice[0][0]), int(twice[0][1])
        raise ValueError(f"{name}: routed_experts[{row}, {layer}] names an expert twice")
