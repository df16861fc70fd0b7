"""The search for samples whose tokens do not belong to their log-probs. Pure.

Sampler and scorer give each token a log-prob under the same version (`workers.trainer.guard`). For
tokens that were not sampled the two are nats apart; for sound ones they differ by rounding, which
in 16 bits has heavy tails. So a sample of n tokens has other tokens if the mean distance of all but
its farthest one is above

    mean + REACH * deviation / sqrt(n)     of the tokens of sound samples: noise
    band                                   of the guard: what a step may have (decision 0082)

The set of sound samples is found by iteration, from the half with the smallest means on. One other
token among many, or one as likely as the sampled one, cannot be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.workers.trainer.guard import FLOOR, compared, usual

REACH = 6.0  # not one of 8,000 sound samples lies beyond by chance
ITERATIONS = 20
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Distance of sampler and scorer over a sample's comparable tokens, nats."""

    name: SampleId
    step: int
    num: int
    mean: float
    square: float  # mean of the squares
    rest: float  # mean without the farthest token; of a single token 0: it says nothing

    @classmethod
    def of(cls, name: SampleId, step: int, apart_N: npt.NDArray[np.floating]) -> Self:
        """
        Args:
            apart_N: distance of each token, nats.
        """
        num, total = len(apart_N), float(apart_N.sum(dtype=np.float64))
        return cls(
            name=name,
            step=step,
            num=num,
            mean=total / num,
            square=float((apart_N.astype(np.float64) ** 2).mean()),
            rest=(total - float(apart_N.max())) / (num - 1) if num > 1 else 0.0,
        )


def distances(samples: Iterable[ScoredTrajectory], step: int) -> list[Distance]:
    """Return the distances of a step's samples that can be compared."""
    found: list[Distance] = []
    for scored in samples:
        parts = [part.distance_N for part in compared([scored])]
        if parts:
            one = scored.trajectory
            name = SampleId.of(one)
            found.append(Distance.of(name, step, np.concatenate(parts)))
    return found


def others(
    found: Sequence[Distance], steps: Sequence[float], factor: float
) -> tuple[list[tuple[Distance, float]], str]:
    """Return samples of other tokens, each with the border that it exceeds; and the noise as text.

    Args:
        steps: the mean of each step of the run, as the guard takes it; empty: not recorded.
        factor: `guard.factor`.
    """
    if not found:
        return [], ""
    num = np.array([one.num for one in found], np.float64)
    mean = np.array([one.mean for one in found])
    square = np.array([one.square for one in found])
    rest = np.array([one.rest for one in found])
    noise = usual(steps) if steps else float(np.median(mean))
    band = max(FLOOR, factor * noise)
    is_sound = mean <= np.median(mean)
    border = _border(num, mean, square, is_sound)
    for _ in range(ITERATIONS):
        border = _border(num, mean, square, is_sound)
        now = rest <= np.maximum(border, band)
        if (now == is_sound).all():
            break
        is_sound = now
    note = f"noise {noise:.1e} nats a token"
    bad = np.flatnonzero(~is_sound)
    return [(found[n], max(float(border[n]), band)) for n in bad.tolist()], note


def _border(num: Floats, mean: Floats, square: Floats, is_sound: npt.NDArray[np.bool_]) -> Floats:
    """Return, by sample, the largest mean that is noise."""
    tokens = num[is_sound].sum()
    middle = float((num * mean)[is_sound].sum() / tokens)
    spread = math.sqrt(max(float((num * square)[is_sound].sum() / tokens) - middle**2, 0.0))
    border: Floats = middle + REACH * spread / np.sqrt(num)
    return border
