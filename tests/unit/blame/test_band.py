"""Where a metric left its band: jumps are named, clean series are not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlstreams.debug.blame.band import Band, Point, band_of, departure
from rlstreams.debug.blame.series import error_of
from rlstreams.streams.log.errors import ConfigError

STEPS, SERIES = 60, 60
DECAY = 0.8 ** np.arange(9)
CLEAN = {
    "normal": lambda draw, t: draw.normal(size=len(t)),
    "heavy tails": lambda draw, t: draw.standard_t(3, size=len(t)),
    "spikes": lambda draw, t: np.exp(draw.normal(size=len(t))),
    "correlated": lambda draw, t: np.convolve(draw.normal(size=len(t)), DECAY)[:STEPS],
    "falls as entropy does": lambda draw, t: 20 * np.exp(-t / 12) + draw.normal(size=len(t)),
    "constant": lambda draw, t: np.full(len(t), 2e-4),
}  # fmt: skip


def points(values) -> list[Point]:
    return [Point(step=step, value=float(value)) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_run_is_not_accused(kind: str) -> None:
    """Of 60 series of each kind at most one."""
    steps = np.arange(STEPS)
    accused = [
        seed
        for seed in range(SERIES)
        if departure(points(CLEAN[kind](np.random.default_rng(seed), steps)))
    ]
    assert len(accused) <= 1, accused


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_jump_is_named_at_its_step(seed: int, sign: int) -> None:
    """Also behind a drift, with an outlier before it, and a step behind it that looks usual."""
    values = np.random.default_rng(seed).normal(size=STEPS) - 0.05 * np.arange(STEPS)
    values[12] += 40  # comes back
    values[35:] += sign * 40
    values[45] -= sign * 40
    found = departure(points(values))
    assert found is not None
    assert (36, 35, 24, 25) == (
        found.point.step, found.before.step, found.num_outside, found.num_points
    )  # fmt: skip


def test_what_comes_back_and_what_is_too_new_is_no_departure() -> None:
    values = np.random.default_rng(0).normal(size=STEPS)
    values[20:30] += 40
    assert departure(points(values)) is None
    values[20:30] -= 40
    values[-2:] += 40
    assert departure(points(values)) is None
    values[-3] += 40
    found = departure(points(values))
    assert found is not None
    assert STEPS - 2 == found.point.step


def test_no_reward_is_too_high_and_nan_is_outside() -> None:
    values = np.random.default_rng(0).normal(size=STEPS)
    values[30:] += 40
    assert departure(points(values), higher_is_better=True) is None
    assert departure(points(values)) is not None
    values[30:] = math.nan
    found = departure(points(values), higher_is_better=True)
    assert found is not None
    assert 31 == found.point.step


def test_rare_evaluations_are_told_by_their_error() -> None:
    """Seven means of 256 answers: a rise is none, a fall is, and the error decides how large."""
    rises = [0.42, 0.67, 0.86, 0.90, 0.90, 0.89, 0.91]

    def evaluations(values, error):
        return [Point(step=10 * n, value=v, error=error) for n, v in enumerate(values)]

    falls = [*rises[:5], 0.3, 0.25]
    assert departure(evaluations(rises, 0.02), higher_is_better=True) is None
    found = departure(evaluations(falls, 0.02), higher_is_better=True)
    assert found is not None
    assert 50 == found.point.step
    assert departure(evaluations(falls, 0.2), higher_is_better=True) is None
    assert departure(evaluations(falls, 0.0), higher_is_better=True) is None  # nothing is known


def test_a_fall_on_few_rows_is_found_and_their_noise_is_not() -> None:
    """From 0.64 to 0.23 on 64 rows, behind two evaluations that were lower; not one by chance."""

    def evaluations(values):
        return [Point(step=10 * n, value=v, error=error_of(v, 64)) for n, v in enumerate(values)]

    found = departure(evaluations([0.31, 0.55, 0.64, 0.23]), higher_is_better=True)
    assert found is not None
    assert 30 == found.point.step
    draw = np.random.default_rng(0)
    curve = np.array([0.4, 0.6, 0.75, 0.85, 0.9, 0.9])
    runs = draw.binomial(64, curve, (2000, len(curve))) / 64
    alarms = [departure(evaluations(run), higher_is_better=True) for run in runs.tolist()]
    assert sum(one is not None for one in alarms) <= 2


def test_a_given_band_holds_for_all_steps() -> None:
    found = departure(points([0.5, 0.1, 0.5, 0.1, 0.1]), band_of("0.2:"))
    assert found is not None
    assert (4, Band(low=0.2, high=math.inf)) == (found.point.step, found.band)
    for text in ("0.2", ":", "x:1", "nan:1", "2:1"):
        with pytest.raises(ConfigError, match="--band"):
            band_of(text)
