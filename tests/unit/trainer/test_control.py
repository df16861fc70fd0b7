"""The control run's rewards: the same ones, dealt out at random."""

from __future__ import annotations

from rlstreams.workers.trainer.learn.advantage import permuted


def test_permuted_rewards_are_the_same_rewards_for_other_samples() -> None:
    """Nothing is added or lost, the deal differs by step, and a redo repeats it."""
    rewards = [float(number) for number in range(20)]
    assert sorted(permuted(rewards, 1)) == rewards
    assert permuted(rewards, 1) == permuted(rewards, 1)
    assert permuted(rewards, 1) != permuted(rewards, 2) != rewards
