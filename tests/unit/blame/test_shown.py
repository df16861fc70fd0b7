"""The lines of `blame` say in which direction an effect must lie."""

from __future__ import annotations

import pytest

from rlstreams.debug.blame.blame import Blamed
from rlstreams.debug.blame.text import lines


@pytest.mark.parametrize(
    ("metric", "now", "without", "told"),
    [
        ("held_out", 0.9, 0.8, "must be below -0.03 to be no chance"),  # a reward: what cost some
        ("entropy", 0.17, 0.18, "must be below -0.03 to be no chance"),  # it fell
        ("entropy", 0.18, 0.17, "must be above 0.03 to be no chance"),
        ("entropy", 0.18, float("nan"), "must be above 0.03 to be no chance"),
    ],
)
def test_an_effect_has_a_direction(metric: str, now: float, without: float, told: str) -> None:
    found = Blamed(
        metric=metric,
        first=8,
        last=8,
        at=9,
        now=now,
        without=without,
        effects=(),
        random_effects=(-0.01, 0.005),
        border=0.03,
        num_sets=2,
        num_experiments=1,
        num_steps=1,
        started_from="the model folder",
    )
    text = "\n".join(lines(found))
    assert f"2 random sets of as many samples: -0.01 to +0.005; an effect {told}" in text
