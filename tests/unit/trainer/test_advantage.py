"""Group-relative advantages against hand-made numbers."""

import numpy as np
import pytest

from rlstreams.workers.loop.validation import MAX_REWARD
from rlstreams.workers.trainer.learn.advantage import group_advantages


def test_relative_to_the_group():
    """Siblings that are interleaved with another group are compared among themselves."""
    actual = group_advantages([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"])
    half = 0.5 / (np.sqrt(0.5) + 1e-6)
    one = 1.0 / (np.sqrt(2.0) + 1e-6)
    np.testing.assert_allclose(actual, [half, -one, -half, one], rtol=1e-6)
    assert actual.dtype == np.float32


def test_without_the_standard_deviation():
    """Dr. GRPO keeps the size of the rewards."""
    actual = group_advantages([1.0, 0.0, 0.0, 0.0], ["a"] * 4, normalize_std=False)
    np.testing.assert_array_equal(actual, np.float32([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("reward", [0.1, 1e9, -3.0])
def test_equal_rewards_teach_nothing(reward):
    """Not even the rounding of the mean is blown up by the small divisor."""
    np.testing.assert_array_equal(group_advantages([reward] * 3, ["a"] * 3), np.zeros(3))


def test_a_lone_sample_teaches_nothing_unless_asked():
    """Without siblings there is nothing to compare; on demand mean 0 and deviation 1 stand in."""
    np.testing.assert_array_equal(group_advantages([0.5], ["a"]), [0.0])
    asked = group_advantages([0.5, 3.0, 1.0], ["a", "b", "b"], lone="reward")
    np.testing.assert_allclose(asked, [0.5, np.sqrt(0.5), -np.sqrt(0.5)], rtol=1e-5)
    bare = group_advantages([0.5], ["a"], lone="reward", normalize_std=False)
    np.testing.assert_array_equal(bare, [0.5])


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
    """The index and the value are named."""
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, ["a", "b"])
