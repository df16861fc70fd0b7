"""Metrics of a step from its samples alone, without the model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.segments import num_sampled
from rlstreams.workers.trainer.intake.payloads import Payload

MAX_PARTS = 32  # of a reward, in a step's metrics; trajectories have all of them


def batch_metrics(payloads: Sequence[Payload]) -> dict[str, float]:
    """Rewards, lengths and turns: means over the batch; a sample without a part counts 0 for it."""
    by_group: dict[str, list[float]] = {}
    for payload in payloads:
        trajectory = payload.scored.trajectory
        by_group.setdefault(trajectory.group_id, []).append(trajectory.reward)
    rewards = [reward for group in by_group.values() for reward in group]
    lengths = [num_sampled(payload.scored.trajectory) for payload in payloads]
    return {
        **part_means([payload.scored.trajectory.reward_parts for payload in payloads]),
        "reward": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)),
        "equal_reward_groups": float(
            np.mean([len(set(group)) == 1 for group in by_group.values()])
        ),
        "response_tokens": float(np.mean(lengths)),
        **_turns([payload.scored.trajectory for payload in payloads]),
    }


def part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the reward's parts, as metrics `reward/NAME`; at most `MAX_PARTS`, for people."""
    names = sorted({name for of_sample in parts for name in of_sample})[:MAX_PARTS]
    return {f"reward/{name}": sum(p.get(name, 0.0) for p in parts) / len(parts) for name in names}


def _turns(batch: Sequence[Trajectory]) -> dict[str, float]:
    """For samples with an environment: turns of the policy and tokens of the environment, means of
    the samples; empty if no sample has any."""
    said = [[s for s in one.segments if s.author == "environment"] for one in batch]
    if not any(said):
        return {}
    turns = [1 + len(segments) for segments in said]
    return {
        "turns": float(np.mean(turns)),
        "turns_max": float(max(turns)),
        "environment_tokens": float(np.mean([sum(len(s.token_ids) for s in one) for one in said])),
    }
