"""Where two graders differ more than elsewhere is found, also if the other one errs by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlstreams.debug.evidence.opinion import KINDS, DisagreementPlace, Judged, Opinion
from rlstreams.debug.evidence.opinion_text import lines
from rlstreams.streams.log.group_ids import SampleId

STEPS, GROUPS, SIZE = 6, 8, 8
Told = Callable[[int, int, int], float]  # a reward, by step, group and sample


def right(step: int, group: int, sample: int) -> float:
    return float((7 * step + 3 * group + sample) % 3 == 0)


def opinion(was: Told, said: Told = right, *, errors: float = 0.0, seed: int = 0) -> Opinion:
    """Of a made-up run; the other grader is wrong for a share of answers."""
    draw = np.random.default_rng(seed)
    judged = [
        Judged(
            name=SampleId(str(step * GROUPS + group), sample),
            step=step,
            was=was(step, group, sample),
            said=abs(said(step, group, sample) - (draw.random() < errors)),
            advantage=float(sample),
            text=f"{sample}",
            made=dict(zip(KINDS, (f"rollout-{sample % 2}", "a" * 12, "stop"), strict=True)),
        )
        for step in range(1, STEPS + 1)
        for group in range(GROUPS)
        for sample in range(SIZE)
    ]  # fmt: skip
    return Opinion("other", "", judged, Counter())


def in_group(number: int) -> Told:
    """The run's grader turned the rewards of one group round."""
    return lambda s, g, n: right(s, g, n) if s * GROUPS + g != number else 1 - right(s, g, n)


@pytest.mark.parametrize(("errors", "least"), [(0.0, 10), (0.05, 10), (0.1, 8), (0.2, 1)])
def test_the_group_of_which_it_turned_the_rewards_is_named_alone(errors: float, least: int) -> None:
    """One of 48; of eight answers an opinion that is often wrong may turn too many back."""
    named = 0
    for seed in range(10):
        groups = [place.name for place in opinion(in_group(20), errors=errors, seed=seed).groups]
        assert groups in ([], ["20"]), (seed, groups)
        named += bool(groups)
    assert named >= least


@pytest.mark.parametrize("errors", [0.0, 0.05, 0.2, 0.6])
def test_of_graders_that_differ_everywhere_alike_nobody_is_named(errors: float) -> None:
    named = 0
    for seed in range(30):
        found = opinion(right, errors=errors, seed=seed)
        named += bool(found.groups or found.begins or found.makers)
    assert named <= 1, named


def test_from_which_step_on_a_hole_is_used_and_whose_samples_they_are() -> None:
    """From step 4 on all answers of one worker are paid, whatever they are."""

    def paid(step: int, group: int, sample: int) -> float:
        return max(right(step, group, sample), float(step >= 4 and sample % 2 == 1))

    for seed in range(10):
        found = opinion(paid, errors=0.05, seed=seed)
        assert found.begins is not None
        assert found.begins.name == "4"
        assert [(one.kind, one.name) for one in found.makers] == [("worker", "rollout-1")]
    told = "\n".join(lines(found, "runs/demo"))
    assert "From step 4 on they differ more: " in told
    assert "More than others: worker rollout-1, " in told


def test_an_answer_that_was_sampled_often_counts_once() -> None:
    """Who is wrong of it is wrong each time: eight equal answers of a group are no evidence."""
    judged = [
        replace(one, was=0.0, said=float(one.name[0] == "20"), text="the same")
        if one.name[0] == "20"
        else replace(one, said=one.was)
        for one in opinion(right).judged
    ]
    found = Opinion("other", "", judged, Counter())
    assert len(found.differing) == SIZE
    assert not found.groups


def test_of_another_scale_the_order_within_a_group_counts() -> None:
    """Points out of 100, with some for trying: no number is equal, and nobody is wronged."""

    def points(step: int, group: int, sample: int) -> float:
        return 20 + 80 * right(step, group, sample)

    same = opinion(right, points)
    assert same.has_other_scale
    assert not same.differing
    turned = opinion(in_group(20), points)
    assert [place.name for place in turned.groups] == ["20"]
    assert len(turned.differing) == SIZE
    assert any("another order within their group" in line for line in lines(turned, "runs/demo"))


def test_a_place_gains_by_a_larger_share_alone() -> None:
    given = {"kind": "group", "name": "x"}
    sure = DisagreementPlace(**given, num=8, of=8, num_others=0, of_others=120)
    assert sure.gain == pytest.approx(
        -2 * (8 * np.log(8 / 128) + 120 * np.log(120 / 128)), rel=1e-9
    )
    assert DisagreementPlace(**given, num=0, of=8, num_others=60, of_others=120).gain == 0
    assert DisagreementPlace(**given, num=1, of=8, num_others=15, of_others=120).gain == 0
