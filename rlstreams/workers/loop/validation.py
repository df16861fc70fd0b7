"""Validation of samples, which rollout, scoring and training rely on. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import (
    EVALUATE,
    NO_VERSION,
    TRAIN,
    Prompt,
    Segment,
    Tensor,
    Trajectory,
)
from rlstreams.streams.log.group_ids import evaluation_id, issue_number
from rlstreams.streams.rows import row_places

AUTHORS = ("prompt", "policy", "environment")
# Differences of rewards go into float32, and times the largest ratio (e^20) and the usual cap of a
# weight their squares still fit it: the gradient's norm has room. No reward is larger than this.
MAX_REWARD = 1e9
LOGPROB_ROUNDING = 1e-4  # largest log-prob that counts as 0, nats
MAX_ROUTES = 4096  # layers x top_k; the largest models have some 500
_INTEGERS = ("uint8", "uint16", "int32", "int64")
_FLOATS = ("float32", "float16")
_READ_ID: dict[str, Callable[[str], object]] = {TRAIN: issue_number, EVALUATE: evaluation_id}


def is_group_number(group_id: str) -> bool:
    """Whether a training group can have this id; not `07`: two ids would name one group."""
    return issue_number(group_id) is not None


def check_prompt(prompt: Prompt) -> None:
    """Check that a sample can be rolled out; the engine itself checks vocabulary and lengths.

    Raises:
        ValueError: names the field and the value: an id or purpose that no run gives, a sample
            number outside of its group, no token, ids that are no ids, metadata that is no object.
    """
    _check_identity(prompt)
    ids = prompt.token_ids.numpy()
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ValueError(f"token_ids must be integers [tokens], got {ids.dtype} {ids.shape}")
    if ids.min() < 0:
        raise ValueError(f"token_ids must be 0 or above, got {ids.min()}")
    if prompt.metadata and not isinstance(json.loads(prompt.metadata), dict):
        raise ValueError(f"metadata must be a JSON object, got {prompt.metadata[:80]!r}")


def check_trajectory(trajectory: Trajectory, vocab_size: int, max_tokens: int) -> None:
    """Check that every number of a trajectory is usable.

    A tensor is unpacked only once its shape is known to be that of its field: a few compressed
    bytes may declare any size.

    Args:
        max_tokens: most that the model takes.

    Raises:
        ValueError: names the field, the place and the value: an id that no run gives, a reward that
            `check_reward` refuses, a sample number outside of its group, an unknown author, ids
            outside of the vocabulary, log-probs that are missing, NaN, infinite or above 0, lengths
            that disagree, a policy segment without a version or another with one; a row with more
            tokens than `max_tokens`, no policy token or one with nothing before it; routed experts
            of another shape, an expert twice in a row, or a mask of experts that are not there.
    """
    _check_identity(trajectory)
    check_reward("reward", trajectory.reward)
    for name, part in trajectory.reward_parts.items():
        check_reward(f"reward_parts[{name!r}]", part)
    num_tokens = _count_tokens(trajectory, max_tokens)
    for index, segment in enumerate(trajectory.segments):
        _check_segment(f"segments[{index}]", segment, vocab_size)
    places = row_places(trajectory)
    for place in places:
        own, name = [trajectory.segments[number] for number in place], _name(place, places)
        authors = [s.author for s in own if len(s.token_ids)]
        if "policy" not in authors:
            raise ValueError(f"{name}: none by the policy has tokens")
        if authors[0] == "policy":
            raise ValueError(
                f"{name}: the first token is the policy's, with nothing to condition on"
            )
    _check_experts(trajectory.routed_experts, trajectory.routed_experts_mask, num_tokens - 1)


def _count_tokens(trajectory: Trajectory, max_tokens: int) -> int:
    """Number of tokens, by the shapes alone."""
    for index, segment in enumerate(trajectory.segments):
        ids = segment.token_ids
        if len(ids.shape) != 1 or ids.shape[0] < 0 or ids.dtype not in _INTEGERS:
            raise ValueError(
                f"segments[{index}].token_ids must be integers [tokens], "
                f"got {ids.dtype} {list(ids.shape)}"
            )
    places = row_places(trajectory)
    sizes = [sum(len(trajectory.segments[n].token_ids) for n in place) for place in places]
    for place, num_tokens in zip(places, sizes, strict=True):
        if num_tokens > max_tokens:
            raise ValueError(
                f"{_name(place, places)} hold {num_tokens} tokens, the model takes {max_tokens}"
            )
    return sum(sizes)


def _name(place: range, places: Sequence[range]) -> str:
    """Name of a row's segments; a single row has them all."""
    return "segments" if len(places) == 1 else f"segments[{place.start}:{place.stop}]"


def _check_identity(sample: Prompt | Trajectory) -> None:
    if sample.purpose not in _READ_ID:
        raise ValueError(f"purpose must be one of {tuple(_READ_ID)}, got {sample.purpose!r}")
    if _READ_ID[sample.purpose](sample.group_id) is None:
        raise ValueError(
            f"group_id must be an issue number, or e{{version}}-{{row}} of an evaluation, "
            f"got {sample.group_id[:40]!r}"
        )
    if not 0 <= sample.sample < sample.group_size:
        raise ValueError(
            f"sample must be below group_size {sample.group_size}, got {sample.sample}"
        )


def _check_segment(name: str, segment: Segment, vocab_size: int) -> None:
    if segment.author not in AUTHORS:
        raise ValueError(f"{name}.author must be one of {AUTHORS}, got {segment.author!r}")
    ids = segment.token_ids.numpy()
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"{name}.token_ids[{at}] must be below {vocab_size}, got {ids[at]}")
    if segment.author != "policy":
        if segment.policy_version != NO_VERSION or segment.behavior_logprobs is not None:
            raise ValueError(
                f"{name} is by {segment.author}, and has policy version {segment.policy_version} "
                "or log-probs: no policy sampled it"
            )
        return
    if segment.policy_version < 0:
        raise ValueError(f"{name}.policy_version must be 0 or above, got {segment.policy_version}")
    if segment.behavior_logprobs is None:
        raise ValueError(f"{name}.behavior_logprobs is missing")
    check_logprobs(f"{name}.behavior_logprobs", segment.behavior_logprobs, len(ids))


def check_reward(name: str, value: float) -> None:
    """Check that a reward can be learnt from: finite, and at most `MAX_REWARD` either way.

    Raises:
        ValueError: names field and value.
    """
    if not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise ValueError(
            f"{name} must be finite and within {MAX_REWARD:g} of 0, got {value}: in float32 a "
            "step could not be made of it"
        )


def check_logprobs(name: str, tensor: Tensor, num_tokens: int) -> None:
    """Check floats `[num_tokens]`: finite and at most 0 nats.

    Raises:
        ValueError: names field, place and value.
    """
    values = floats_of(name, tensor, num_tokens)
    unusable = np.flatnonzero(~(np.isfinite(values) & (values <= LOGPROB_ROUNDING)))
    if len(unusable):
        at = int(unusable[0])
        raise ValueError(f"{name}[{at}] must be finite and at most 0, got {values[at]}")


def floats_of(name: str, tensor: Tensor, num_tokens: int) -> npt.NDArray[Any]:
    """The floats `[num_tokens]` of a tensor.

    Raises:
        ValueError: it is another tensor, or damaged; names the field.
    """
    if tensor.shape != (num_tokens,) or tensor.dtype not in _FLOATS:
        raise ValueError(
            f"{name} must be floats [{num_tokens}], got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.numpy()


def _check_experts(experts: Tensor | None, mask: Tensor | None, num_rows: int) -> None:
    if experts is None:
        if mask is not None:
            raise ValueError("routed_experts_mask is there, routed_experts is not")
        return
    shape = experts.shape
    if len(shape) != 3 or shape[0] != num_rows:
        raise ValueError(f"routed_experts has shape {shape}, [{num_rows}, layers, top_k]")
    if min(shape) < 0 or shape[1] * shape[2] > MAX_ROUTES:
        raise ValueError(f"routed_experts has shape {shape}: at most {MAX_ROUTES} for a token")
    if experts.dtype not in ("uint8", "uint16"):
        raise ValueError(f"routed_experts is {experts.dtype}")
    if mask is not None and (mask.shape != (num_rows,) or mask.dtype != "uint8"):
        raise ValueError(
            f"routed_experts_mask must be uint8 [{num_rows}], got {mask.dtype} {list(mask.shape)}"
        )
    recorded = mask.numpy().astype(bool) if mask is not None else np.ones(num_rows, bool)
    ranked = np.sort(experts.numpy(), axis=-1)
    twice = np.argwhere(ranked[..., 1:] == ranked[..., :-1])
    twice = twice[recorded[twice[:, 0]]]
    if len(twice):
        row, layer = int(twice[0][0]), int(twice[0][1])
        raise ValueError(f"routed_experts[{row}, {layer}] names an expert twice")
