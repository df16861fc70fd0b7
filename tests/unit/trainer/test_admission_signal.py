"""Groups that a step could not learn from: what the planner does with them."""

import dataclasses

from rlstreams.schemas.events import MaskedSegment
from rlstreams.streams.log.record import Position
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.intake.groups import SeenSample
from tests.unit.trainer.test_admission import admission, filled, reasons
from tests.unit.trainer.trainer_builders import (
    dead,
    policy_segment,
    prompt_segment,
    scored,
    seen,
)


def with_rewards(*rewards, group=0, truncated=(), versions=None):
    """Samples of one group."""
    return [
        dataclasses.replace(
            seen(
                group,
                number,
                size=len(rewards),
                versions=(versions[number] if versions else 0,),
            ),
            reward=reward,
            is_truncated=number in truncated,
        )
        for number, reward in enumerate(rewards)
    ]


def planner_of(samples, **options):
    planner = admission(**options)
    for sample in samples:
        planner.add(sample, 0.0)
    return planner


def test_a_group_without_signal_is_dropped_on_demand():
    """All earned the same: by default it is trained; else another row gets its place."""
    assert planner_of(with_rewards(1.0, 1.0)).plan(0) is not None
    planner = planner_of(with_rewards(1.0, 1.0), equal_rewards="drop")
    assert planner.plan(0) is None
    assert reasons(planner) == [("0", "no_signal", True)]
    kept = planner_of(with_rewards(1.0, 0.5), equal_rewards="drop")
    assert reasons(kept) == []
    assert kept.plan(0) is not None


def test_an_incomplete_group_may_still_get_a_signal():
    """Equal so far is not equal."""
    planner = planner_of(with_rewards(1.0, 1.0, 0.0)[:2], equal_rewards="drop")
    assert reasons(planner) == []


def test_a_lone_survivor_has_no_signal_unless_its_reward_is_one():
    """What it is compared with decides."""
    for lone, expected in (("zero", [("0", "no_signal", True)]), ("reward", [])):
        planner = planner_of(
            with_rewards(1.0, 0.0)[:1],
            equal_rewards="drop",
            min_group_samples=1,
            loss=LossSection(lone=lone),
        )
        planner.dead(dead(0, 1), 0.0)
        assert reasons(planner) == expected


def test_truncated_samples_are_masked_on_demand():
    """They stay in the batch, for their siblings are compared with them, and out of the loss."""
    samples = with_rewards(1.0, 0.0, truncated=(1,))
    by_default = planner_of(samples).plan(0)
    assert by_default.masked == ()
    plan = planner_of(samples, loss=LossSection(mask_truncated=True)).plan(0)
    assert plan.masked == (MaskedSegment(group_id="0", sample=1, segment=1, staleness=0),)
    assert [p.oldest_policy_version for p in plan.samples] == [0, -1]


def test_a_group_with_nothing_but_truncated_samples_is_dropped():
    """A batch of such groups would have no token to learn from."""
    loss = LossSection(mask_truncated=True)
    planner = planner_of(with_rewards(1.0, 0.0, truncated=(0, 1)), loss=loss)
    assert planner.plan(0) is None
    assert reasons(planner) == [("0", "truncated", True)]


def test_what_is_truncated_does_not_keep_a_stale_group():
    """The only fresh segment is out of the loss: nothing is left of the group."""
    samples = with_rewards(1.0, 0.0, truncated=(1,), versions=(0, 5))
    planner = planner_of(samples, loss=LossSection(mask_truncated=True), max_staleness=1)
    assert planner.plan(5) is None
    assert reasons(planner, version=5) == [("0", "stale", False)]


def test_a_plan_that_cannot_be_trained_is_given_back():
    """The group at fault is dropped with what was found; the others are planned again."""
    planner = filled(0, 1, 2, groups_per_step=2)
    plan = planner.plan(0)
    assert plan is not None
    planner.give_back(plan, {"0": ("numerics", "sample 1: loss is nan")})
    (drop,) = planner.drops(0, 0.0)
    assert (drop.group_id, drop.reason, drop.permanent) == ("0", "numerics", False)
    assert drop.detail.endswith("; sample 1: loss is nan")
    again = planner.plan(0)
    assert again.group_ids == ("1", "2")


def test_how_a_sample_ended_is_its_last_word():
    """A segment that was cut by a pull and gone on with is no truncated answer."""
    first = dataclasses.replace(policy_segment([3], [-1.0]), finish_reason="length")
    last = policy_segment([4], [-1.0], version=1)
    position = Position("scored-trajectories", 0, 0)
    ended = scored((prompt_segment(), first, last))
    cut = scored((prompt_segment(), last, first))
    assert not SeenSample.of(ended, position).is_truncated
    assert SeenSample.of(cut, position).is_truncated
