"""The band of a metric, and the point at which the metric left it for good. Pure.

A band is learnt from the points before: median and median absolute deviation (MAD), so that a few
wild steps do not widen it. It is learnt anew for each point from the newest ones, so that a metric
that drifts slowly, as entropy does in a run that learns, takes its band along. For a few means
whose error is known, as held-out rewards, that error makes the band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rlstreams.streams.log.errors import ConfigError

WINDOW = 20  # points that a band is learnt from: more of them, and a drift would widen it
MIN_BEFORE = 8  # fewer say too little about the noise
MIN_AFTER = 3  # points behind the border: one or two are an outlier, and come back
RETURNS = 0.1  # share of the points from the first one on that may lie inside all the same
SIGMA = 1.4826  # MAD to standard deviation, of a normal distribution
# Standard deviations from the median to the border. Of 300 random series each (normal, of heavy
# tails, correlated, linear, exponential) at most 3 in 100 leave the band at 6; at 4 it is 1 in 10.
REACH = 6.0
SURE = 4.0  # the same of means whose error is known: 1 in 10,000 falls so far by chance
FEW = 3.0  # points that the reach grows with: a MAD of 8 points may be half of the true one


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Usual values of a metric, the borders included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high  # not NaN

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A metric's value at one step."""

    step: int
    value: float
    error: float = 0.0  # standard error, where the value is a mean of few; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The point at which a metric left its band for good."""

    point: Point  # the first outside
    before: Point | None  # the point before it
    band: Band
    num_outside: int  # points outside, from `point` to the end
    num_points: int  # all points from `point` to the end


def band_of(text: str) -> Band:
    """`LOW:HIGH`; one may be left out. Raises ConfigError: anything else, or LOW above HIGH."""
    low, colon, high = text.partition(":")
    try:
        band = Band(low=float(low or "-inf"), high=float(high or "inf"))
    except ValueError:
        colon, band = "", Band(low=0.0, high=0.0)
    if not colon or text == ":":
        raise ConfigError(f"--band takes LOW:HIGH, LOW:, :HIGH or learnt, got {text!r}")
    if not band.low <= band.high:
        raise ConfigError(f"--band {text}: {low} is above {high}, so nothing lies in it")
    return band


def learnt(before: Sequence[Point], *, higher_is_better: bool) -> Band | None:
    """Return the band of the point that follows these; None: too few points.

    Args:
        higher_is_better: no value is too high.
    """
    values = [point.value for point in before[-WINDOW:] if math.isfinite(point.value)]
    error = max((point.error for point in before[-WINDOW:]), default=0.0)
    if len(values) < MIN_BEFORE and not error:
        return None
    if not values:
        return None
    if len(values) < MIN_BEFORE:  # rare measurements, whose noise need not be learnt
        middle = median(values[-MIN_AFTER:])
        if higher_is_better:  # a rising metric is above its median
            middle = max(middle, values[-1])
        reach = SURE * math.sqrt(2) * error  # of a difference of two
    else:
        middle = median(values)
        spread = SIGMA * median(abs(value - middle) for value in values)
        reach = REACH * (1 + FEW / len(values)) * max(spread, error)
    return Band(low=middle - reach, high=math.inf if higher_is_better else middle + reach)


def departure(
    points: Sequence[Point], band: Band | None = None, *, higher_is_better: bool = False
) -> Departure | None:
    """Return the point at which a metric left its band for good; None: nowhere, or too late to say.

    Args:
        points: in order; a value that is not finite is outside of every band.
        band: None: it is learnt, see `learnt`.
    """
    for number, point in enumerate(points):
        own = band or learnt(points[:number], higher_is_better=higher_is_better)
        if own is None or point.value in own:
            continue
        rest = points[number:]
        is_above = point.value > own.high
        outside = sum(other.value not in own and (other.value > own.high) == is_above
                      for other in rest)  # fmt: skip
        is_measured = point.error > 0  # a mean of many answers does not come back by chance
        if outside >= min(MIN_AFTER, len(rest) if band or is_measured else MIN_AFTER) and (
            len(rest) - outside <= RETURNS * len(rest)
        ):
            return Departure(
                point=point,
                before=points[number - 1] if number else None,
                band=own,
                num_outside=outside,
                num_points=len(rest),
            )
    return None
