"""The search for sets whose samples explain a change: halves first, then one by one. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

S = TypeVar("S")

ALONE = 4  # sets that are no longer halved, but tried one by one
PARTS = 2  # parts that are followed at a time: two causes may lie in different halves
FOLLOWED = 0.5  # share of the largest effect that another part needs to be followed beside it
RANDOM_SETS = 8  # sets that show how large an effect of so many samples is by chance
# Times the largest effect of the random sets. The largest of 8 normal ones is about 1.9 standard
# deviations, so this is 5.7: of the sets of 60 steps with 16 groups each not one by chance.
STANDS_OUT = 3.0


def suspects(sets: Sequence[S], effect: Callable[[Sequence[S]], float]) -> list[S]:
    """Return the sets in the parts with the largest effects, the set with the largest first.

    With n sets about 4 log2(n / 4) + 8 different effects are measured; half as many where one part
    alone matters.

    Args:
        effect: measures the effect of leaving sets out; larger is more to blame. NaN: without
            them nothing can be measured, as a step's figure without any of its samples; such a
            part is followed, and such a set alone is no suspect.
    """

    def weight(part: Sequence[S]) -> float:
        found = effect(part)
        return found if math.isfinite(found) else -math.inf

    open_parts = [list(sets)]
    while any(len(part) > ALONE for part in open_parts):
        parts = [half for part in open_parts for half in _halves(part)]
        unknown = [part for part in parts if len(part) > 1 and weight(part) == -math.inf]
        known = sorted((p for p in parts if p not in unknown), key=weight, reverse=True)
        enough = max(FOLLOWED * weight(known[0]), 0.0) if known else 0.0
        others = [part for part in known[1:PARTS] if weight(part) > enough]
        open_parts = [*unknown, *known[:1], *others]
    alone = [one for part in open_parts for one in part]
    return sorted(alone, key=lambda one: weight([one]), reverse=True)


def _halves(part: list[S]) -> list[list[S]]:
    if len(part) <= ALONE:
        return [part]
    middle = (len(part) + 1) // 2
    return [part[:middle], part[middle:]]


def border(random_effects: Sequence[float]) -> float:
    """Return the least effect that is no noise; infinite if no random effect is known."""
    known = [abs(one) for one in random_effects if math.isfinite(one)]
    return STANDS_OUT * max(known) if known else math.inf
