"""Sets that explain a change are found with few experiments, and by chance none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlstreams.debug.blame.search import RANDOM_SETS, border, suspects


class Effects:
    """Sets by number, each with an effect of its own, which add up; counts what was asked for."""

    def __init__(self, own) -> None:
        self.own = own
        self.asked: set[tuple[int, ...]] = set()

    def __call__(self, part) -> float:
        self.asked.add(tuple(part))
        return float(sum(self.own[index] for index in part))


@pytest.mark.parametrize("num", [2, 5, 16, 48, 960])
@pytest.mark.parametrize("seed", range(5))
def test_the_one_that_matters_is_found(num: int, seed: int) -> None:
    draw = np.random.default_rng((num, seed))
    own = 0.01 * draw.normal(size=num)
    culprit = int(draw.integers(num))
    own[culprit] = 1.0
    effects = Effects(own)
    assert culprit == suspects(range(num), effects)[0]
    assert len(effects.asked) <= 4 * math.log2(max(num / 4, 1)) + 12


def test_two_in_different_halves_are_both_found() -> None:
    own = np.zeros(64)
    own[[5, 60]] = (1.0, 0.8)
    assert [5, 60] == list(suspects(range(64), Effects(own)))[:2]


def test_a_part_that_cannot_be_measured_is_halved() -> None:
    """A step's gradient norm, say, without any of its samples; the cause is one of them."""
    effects = Effects([0.1] * 16 + [0.0] * 15 + [1.0])

    def measured(part) -> float:
        return math.nan if set(part) >= set(range(16, 32)) else effects(part)

    assert 31 == suspects(range(32), measured)[0]


def test_what_cannot_be_measured_alone_is_no_suspect() -> None:
    own = np.full(16, 0.1)
    own[3] = math.nan
    own[12] = 1.0
    assert 12 == suspects(range(16), Effects(own))[0]


def test_of_clean_sets_none_reaches_the_border() -> None:
    """In 200 searches among 48 sets whose effects are noise, at most two find one."""
    found = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        effects = Effects(draw.normal(size=48))
        best = suspects(range(48), effects)[0]
        found += effects([best]) > border(draw.normal(size=RANDOM_SETS))
    assert found <= 2
    assert math.inf == border([math.nan])
