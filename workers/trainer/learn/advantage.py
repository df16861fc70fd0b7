"""Group-relative advantages: how much better a sample did than the rest of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlstreams.workers.loop.validation import check_reward

STD_FLOOR = 1e-6


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[str],
    *,
    normalize_std: bool = True,
    lone: Literal["zero", "reward"] = "zero",
) -> npt.NDArray[np.float32]:
    """GRPO advantages, one per sample: (r - mean) / (std + 1e-6), std unbiased, over its group.

    Equal rewards give exactly 0. A sample without siblings has nothing to be compared with: 0, or
    with `lone = "reward"` mean 0 and std 1 stand in, so that its reward itself is used (as in
    verl's `compute_grpo_outcome_advantage`). Without `normalize_std` it is r - mean (Dr. GRPO,
    arXiv 2503.20783).

    Args:
        rewards: by sample, in batch order.
        group_ids: the group of each; siblings need not be neighbours.

    Returns:
        float32 [samples], in batch order. Computed in float64.

    Raises:
        ValueError: lengths that differ, or a reward that `check_reward` refuses.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards, but {len(group_ids)} group_ids")
    for index, reward in enumerate(rewards):
        check_reward(f"rewards[{index}]", reward)
    all_rewards = np.asarray(rewards, np.float64)
    members: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    advantages = np.zeros(len(all_rewards), np.float64)
    for indices in members.values():
        advantages[indices] = _of_group(all_rewards[indices], normalize_std, lone)
    return advantages.astype(np.float32)


def _of_group(
    rewards: npt.NDArray[np.float64], normalize_std: bool, lone: str
) -> npt.NDArray[np.float64]:
    if len(rewards) == 1 and lone == "reward":
        return rewards / (1 + STD_FLOOR) if normalize_std else rewards
    # The mean of equal floats need not be that float, and the floor would blow up the rest.
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + STD_FLOOR) if normalize_std else centred
