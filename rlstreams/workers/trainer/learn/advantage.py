"""Advantages: a sample's reward compared with the rest of its group, or of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.segments import num_sampled
from rlstreams.workers.config.loss import UNCOMPARED, WITHOUT_GROUPS, LossSection
from rlstreams.workers.loop.validation import check_reward

STD_FLOOR = 1e-6
Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[str],
    *,
    normalize_std: bool = True,
    lone: Literal["zero", "reward"] = "zero",
    kind: str = "grpo",
) -> npt.NDArray[np.float32]:
    """One advantage per sample, from the rewards r of its group of n, or of the batch; unbiased
    std.

    - grpo: (r - mean) / (std + 1e-6) (arXiv 2402.03300); without `normalize_std` r - mean (Dr.
      GRPO, arXiv 2503.20783).
    - rloo: r - mean of the n - 1 siblings (arXiv 2402.14740).
    - reinforce++: (r - mean of the batch) / (std of the batch + 1e-6) (arXiv 2501.03262);
      reinforce++baseline: the same of r - mean of the group.
    - maxrl: (r - mean) / mean, for rewards of 0 or more (arXiv 2602.02710).

    Equal rewards give exactly 0. A sample without siblings has no comparison: 0, or with
    `lone = "reward"` mean 0 and std 1 stand in, so that its reward itself is used (as in verl's
    `compute_grpo_outcome_advantage`).

    Args:
        rewards: by sample, in batch order.
        group_ids: the group of each; siblings need not be neighbours.

    Returns:
        float32 [samples], in batch order. Computed in float64.

    Raises:
        ValueError: lengths that differ, or a reward that `check_reward` refuses.
        ConfigError: rewards that `kind` is not defined for; names group and mean.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards, but {len(group_ids)} group_ids")
    for index, reward in enumerate(rewards):
        check_reward(f"rewards[{index}]", reward)
    all_rewards = np.asarray(rewards, np.float64)
    if kind in WITHOUT_GROUPS:
        return standardized(all_rewards).astype(np.float32)
    members: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    advantages = np.zeros(len(all_rewards), np.float64)
    for group_id, indices in members.items():
        own = all_rewards[indices]
        if len(own) == 1 and lone == "reward":
            scaled = kind == "grpo" and normalize_std
            advantages[indices] = own / (1 + STD_FLOOR) if scaled else own
        elif own.min() != own.max():
            # The mean of equal floats need not be that float, and a floor would blow up the rest.
            if kind == "maxrl" and own.min() < 0:
                raise ConfigError(
                    f"trainer.loss.advantage is 'maxrl', but a reward of group {group_id} is "
                    f"{own.min():g}: it is defined for rewards of 0 or more"
                )
            advantages[indices] = _OF_GROUP[kind](own, normalize_std)
    if kind == "reinforce++baseline":
        advantages = standardized(advantages)
    return advantages.astype(np.float32)


def advantages_by(
    rewards: Sequence[float], group_ids: Sequence[str], by: LossSection
) -> npt.NDArray[np.float32]:
    """Advantages as configured: `group_advantages`, or without a comparison r for `reward` and 1
    for `one`, both 0 where `reward_min` is above 0 and r below it. For `gae` r: its tokens have
    their own (`critic.py`)."""
    if by.advantage == "gae":
        return np.asarray(rewards, np.float32)
    if by.advantage in UNCOMPARED:
        all_rewards = np.asarray(rewards, np.float64)
        bare = all_rewards if by.advantage == "reward" else np.ones_like(all_rewards)
        is_left_out = (all_rewards < by.reward_min) & (by.reward_min > 0)
        return np.where(is_left_out, 0.0, bare).astype(np.float32)
    return group_advantages(
        rewards, group_ids, normalize_std=by.normalize_std, lone=by.lone, kind=by.advantage
    )


def shaped_rewards(samples: Sequence[ScoredTrajectory], by: LossSection) -> list[float]:
    """Rewards by sample, less the penalty for the answer's length."""
    rewards = [sample.trajectory.reward for sample in samples]
    if not by.overlong_tokens:
        return rewards
    lengths = [num_sampled(sample.trajectory) for sample in samples]
    return [r + overlong_penalty(num, by) for r, num in zip(rewards, lengths, strict=True)]


def overlong_penalty(num_tokens: int, by: LossSection) -> float:
    """Penalty on the reward for the length of an answer: 0 to `-overlong_factor`.

    With L = `overlong_tokens` and B = `overlong_buffer_tokens`: 0 up to L - B, then falling
    linearly to the whole at L (DAPO, arXiv 2503.14476, equation 13).

    Args:
        num_tokens: of the answer, sampled by the policy.
    """
    over = num_tokens - (by.overlong_tokens - by.overlong_buffer_tokens)
    share = over / by.overlong_buffer_tokens if by.overlong_buffer_tokens else float(over >= 0)
    return -by.overlong_factor * min(max(share, 0.0), 1.0)


def _grpo(rewards: Floats, normalize_std: bool) -> Floats:
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + STD_FLOOR) if normalize_std else centred


def _rloo(rewards: Floats, _: bool) -> Floats:
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def _centred(rewards: Floats, _: bool) -> Floats:
    return rewards - rewards.mean()


def _maxrl(rewards: Floats, _: bool) -> Floats:
    return (rewards - rewards.mean()) / rewards.mean()


_OF_GROUP: Mapping[str, Callable[[Floats, bool], Floats]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce++baseline": _centred,
    "maxrl": _maxrl,
}


def standardized(values: Floats) -> Floats:
    """(x - mean) / (std + 1e-6); 0 where all are equal."""
    if not len(values) or values.min() == values.max():
        return np.zeros_like(values)
    return _grpo(values, True)


def permuted(rewards: Sequence[float], step: int) -> list[float]:
    """The rewards in an order that the step alone decides, so that a redo permutes them alike."""
    order = np.random.default_rng(step).permutation(len(rewards))
    return [rewards[index] for index in order]
