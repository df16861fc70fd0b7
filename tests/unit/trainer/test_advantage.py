"""Group-relative advantages against hand-made numbers."""

import numpy as np
import pytest

from rlstreams.workers.loop.validation import MAX_REWARD
from rlstreams.workers.trainer.learn.advantage import group_advantages


@pytest.mark.parametrize("normalize_std", [True, False])
def test_the_largest_rewards_give_finite_advantages(normalize_std):
    """What the bound lets through is no infinity in float32, nor is its square."""
    rewards = [MAX_REWARD, -MAX_REWARD, 0.0]
    advantages = group_advantages(rewards, ["a"] * 3, normalize_std=normalize_std)
    assert np.isfinite(advantages * np.float32(np.exp(20)) * 2).all()
    assert np.isfinite(np.square(advantages * np.float32(np.exp(20)) * 2)).all()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "1 rewards, but 2 group_ids"),
        ([1.0, float("nan")], r"rewards\[1\].*nan"),
        ([1e39, 0.0], r"rewards\[0\] must be finite and within 1e\+09 of 0, got 1e\+39"),
    ],
)
def test_unusable_rewards_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, ["a", "b"])
