"""How large a log-prob difference is, in steps that an eye can tell apart."""

from __future__ import annotations

import math
from bisect import bisect_right

DIFFERENCE_BOUNDS = (0.01, 0.05, 0.2, 1.0)  # nats; a factor of 1.01, 1.05, 1.2, 2.7 in probability
SURPRISE_BOUNDS = (0.1, 0.5, 1.5, 4.0)  # nats: probability 0.9, 0.6, 0.22, 0.02
ENTROPY_BOUNDS = (0.05, 0.3, 1.0, 2.0)  # nats


def level(value: float, bounds: tuple[float, ...]) -> int:
    """0 below the first bound, len(bounds) from the last one on; 0 for NaN."""
    return 0 if math.isnan(value) else bisect_right(bounds, abs(value))


def signed_level(value: float) -> int:
    """The level of a difference, negative where it is."""
    steps = level(value, DIFFERENCE_BOUNDS)
    return -steps if value < 0 else steps
