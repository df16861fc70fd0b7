"""The planner's decisions, one by one."""

import dataclasses

import pytest

from rlstreams.schemas.events import EVALUATE, AbsentSample, ClosedGroups, MaskedSegment
from rlstreams.streams.log.record import Partition, Position
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.intake.admission import Admission
from rlstreams.workers.trainer.intake.groups import SeenSample
from tests.unit.trainer.trainer_builders import dead, seen

SCORED = Partition("scored-trajectories", 0)
DEAD = Partition("dead-letters", 0)


def admission(closed=None, group_size=None, **options) -> Admission:
    section = TrainerSection(**({"groups_per_step": 1} | options))
    return Admission(section, closed, group_size=group_size)


def filled(*groups, versions=(0,), size=2, **options) -> Admission:
    planner = admission(**options)
    for group in groups:
        for sample in range(size):
            planner.add(seen(group, sample, size=size, versions=versions), 0.0)
    return planner


def reasons(planner, version=0, now_s=0.0):
    return [(d.group_id, d.reason, d.permanent) for d in planner.drops(version, now_s)]


def test_evaluation_never_enters():
    planner = admission()
    assert not planner.add(seen(0, 0, purpose=EVALUATE), 0.0)
    assert not planner.dead(dead("e3-7", 0, purpose=""), 0.0)
    assert planner.num_open_groups == 0


def test_samples_that_were_judged_by_other_code_are_not_trained_together():
    """Their group is dropped and replaced; who does not say what judged it differs from nobody."""
    planner = admission()
    for sample, judge in enumerate(("old", "new")):
        planner.add(seen(0, sample, judged_by=judge), 0.0)
    assert planner.plan(0) is None
    (drop,) = planner.drops(0, 0.0)
    assert ("0", "mixed_code", False) == (drop.group_id, drop.reason, drop.permanent)
    assert "judged by new and old" in drop.detail
    planner.close(["0"])
    for group, judges in ((1, ("old", "old")), (2, ("", "new"))):
        for sample, judge in enumerate(judges):
            planner.add(seen(group, sample, judged_by=judge), 0.0)
    assert [] == reasons(planner)
    assert [planner.plan(0).group_ids for _ in range(2)] == [("1",), ("2",)]


def test_a_stale_segment_is_masked():
    """Only the segments above the bound are masked; the sample's oldest version is of the rest."""
    planner = filled(0, versions=(1, 3), max_staleness=1)
    plan = planner.plan(4)
    assert plan is not None
    expected = tuple(
        MaskedSegment(group_id="0", sample=sample, segment=1, staleness=3) for sample in (0, 1)
    )
    assert expected == plan.masked
    assert [p.oldest_policy_version for p in plan.samples] == [3, 3]


def test_a_group_without_a_fresh_segment_is_dropped():
    planner = filled(0, versions=(1, 2), max_staleness=1)
    assert planner.plan(4) is None
    drop = planner.drops(4, 0.0)[0]
    assert (
        drop.group_id,
        drop.reason,
        drop.permanent,
        drop.staleness,
        drop.row,
        drop.replacement,
    ) == ("0", "stale", False, 3, 7, 1)


def test_a_group_that_may_get_a_fresh_sample_waits():
    """Under "mask" an incomplete stale group is kept until its deadline."""
    planner = admission(max_staleness=1, group_deadline_s=5.0)
    planner.add(seen(0, 0, versions=(0,)), 0.0)
    assert reasons(planner, version=4) == []
    planner.add(seen(0, 1, versions=(4,)), 1.0)
    assert planner.plan(4) is not None


def test_on_stale_drop_takes_the_whole_group_at_once():
    """Under "drop" one stale segment ends its group, complete or not."""
    planner = admission(max_staleness=1, on_stale="drop")
    planner.add(seen(0, 0, versions=(2, 3)), 0.0)
    assert reasons(planner, version=4) == [("0", "stale", False)]
    assert reasons(planner, version=3) == []


@pytest.mark.parametrize("permanent", [False, True])
def test_a_dead_sample_ends_a_group_that_needs_all(permanent):
    """With `min_group_samples` 0 the first dead letter drops the group, before any sample came."""
    planner = admission()
    planner.dead(dead(0, 1, permanent=permanent), 0.0)
    assert [("0", "dead_samples", permanent)] == reasons(planner)


def test_a_group_that_bears_a_dead_sample_is_planned():
    """Above `min_group_samples` the dead sample is absent with its reason."""
    planner = admission(min_group_samples=2)
    planner.dead(dead(0, 1), 0.0)
    planner.add(seen(0, 0, size=3), 0.0)
    planner.add(seen(0, 2, size=3), 0.0)
    assert reasons(planner) == []
    plan = planner.plan(0)
    assert (AbsentSample(group_id="0", sample=1, reason="reward"),) == plan.absent


def test_too_many_dead_samples_drop_a_group():
    """A group goes as soon as it cannot reach the minimum, though samples are still to come."""
    planner = admission(min_group_samples=2)
    planner.add(seen(0, 0, size=3), 0.0)
    planner.dead(dead(0, 1), 0.0)
    assert reasons(planner) == []
    planner.dead(dead(0, 2, permanent=True), 0.0)
    assert reasons(planner) == [("0", "dead_samples", True)]


@pytest.mark.parametrize("letter_first", [False, True])
def test_a_sample_that_is_also_alive_counts_as_alive(letter_first):
    """The order between two topics is chance and decides nothing."""
    planner = admission(min_group_samples=1)
    facts = [lambda: planner.add(seen(0, 0), 0.0), lambda: planner.dead(dead(0, 0), 0.0)]
    for fact in reversed(facts) if letter_first else facts:
        fact()
    planner.add(seen(0, 1), 0.0)
    plan = planner.plan(0)
    assert (len(plan.samples), plan.absent) == (2, ())


def test_a_dead_letter_without_a_sample_ends_its_group():
    """A record that cannot be read far enough leaves its group without a way to be complete."""
    planner = admission(min_group_samples=1)
    planner.add(seen(0, 0), 0.0)
    planner.dead(dead(0, -1), 0.0)
    assert reasons(planner) == [("0", "dead_samples", False)]


def test_an_incomplete_group_has_a_deadline():
    """The deadline counts from the first sample and is named with what came."""
    planner = admission(group_deadline_s=5.0)
    planner.add(seen(0, 0), 10.0)
    assert planner.drops(0, 15.0) == []
    drop = planner.drops(0, 15.5)[0]
    assert (drop.reason, drop.detail) == ("incomplete", "1 of 2 samples after 5.5 s")


@pytest.mark.parametrize(
    ("num_dead", "minimum", "is_over"), [(1, 2, False), (2, 2, True), (2, 1, False), (3, 1, True)]
)
def test_a_group_of_dead_letters_alone_ends_at_once(num_dead, minimum, is_over):
    """The run's group size says when too few samples can still come: no deadline is waited for."""
    planner = admission(min_group_samples=minimum, group_size=3)
    for sample in range(num_dead):
        planner.dead(dead(0, sample), 0.0)
    assert ([("0", "dead_samples", False)] if is_over else []) == reasons(planner)


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_dropped_group_names_its_row_if_any_record_does(is_alive):
    """The first record may be a letter of bytes that nobody could read."""
    planner = admission(min_group_samples=1, group_size=2)
    planner.dead(dataclasses.replace(dead(0, 0), row=-1, replacement=0), 0.0)
    if is_alive:
        planner.add(seen(0, 1), 0.0)
        planner.dead(dead(0, -1), 0.0)
    else:
        planner.dead(dead(0, 1), 0.0)
    (drop,) = planner.drops(0, 0.0)
    assert (7, 1) == (drop.row, drop.replacement)


def test_a_group_of_dead_letters_of_unknown_size_has_a_deadline():
    """Dead letters do not say how large the group is, so only time can end it."""
    planner = admission(group_deadline_s=5.0, min_group_samples=1)
    planner.dead(dead(0, 0, permanent=True), 0.0)
    assert reasons(planner) == []
    assert reasons(planner, now_s=6.0) == [("0", "dead_samples", True)]


def test_a_complete_group_has_no_deadline():
    """What waits for siblings of the batch is not dropped."""
    assert reasons(filled(0, groups_per_step=2), now_s=1e6) == []


def test_a_planned_group_is_out_of_reach():
    """While its step runs a group is not planned again, and no dead letter or time drops it."""
    planner = filled(0, max_staleness=1)
    assert planner.plan(0) is not None
    planner.dead(dead(0, -1), 0.0)
    assert planner.plan(0) is None
    assert reasons(planner, version=9, now_s=1e6) == []


def test_a_group_closes_once():
    planner = filled(0, 1)
    planner.close(["1"])
    assert ClosedGroups(watermark=0, above=(1,)) == planner.closed
    assert ClosedGroups(watermark=2) == planner.closed_after(["0"])
    with pytest.raises(ValueError, match="group 1 is closed already"):
        planner.close(["1"])


def test_low_watermarks_keep_what_open_groups_need():
    """A restart reads from the first record of an open group, planned or not, of both topics."""
    planner = filled(1, 2, min_group_samples=1)
    planner.dead(dead(2, 5, offset=3), 0.0)
    read = {SCORED: 500, DEAD: 9, Partition("scored-trajectories", 1): 4}
    assert planner.plan(0) is not None
    expected = {SCORED: 100, DEAD: 3, Partition("scored-trajectories", 1): 4}
    assert expected == planner.low_watermarks(read)
    assert planner.low_watermarks(read, closing=["1"]) == expected | {SCORED: 200}
    planner.close(["1", "2"])
    assert read == planner.low_watermarks(read)


def test_positions_of_groups_are_those_of_their_samples():
    """Whoever closes groups learns which payloads to let go; unknown groups have none."""
    expected = [Position("scored-trajectories", 0, offset) for offset in (200, 201, 0, 1)]
    assert filled(0, 1, 2).positions_of(["2", "7", "0"]) == expected


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (seen(0, 2, size=2), "below group_size 2"),
        (seen(0, 1, size=3), "group_size 3 differs from its group's 2"),
    ],
)
def test_a_sample_that_does_not_fit_its_group_is_refused(sample, message):
    """Wrong numbers are named with the sample and its position, and change nothing."""
    planner = admission()
    planner.add(seen(0, 0, size=2), 0.0)
    with pytest.raises(ValueError, match=message):
        planner.add(sample, 0.0)
    planner.add(seen(0, 1, size=2), 0.0)
    assert planner.plan(0) is not None


@pytest.mark.parametrize("group_id", ["", "-1", "07", "abc", "e1-2"])
def test_a_group_id_is_an_issue_number(group_id):
    """Two spellings of one number would be two groups."""
    sample = seen(0, 0)
    fields = {name: getattr(sample, name) for name in sample.__slots__}
    planner = admission()
    with pytest.raises(ValueError, match="issue number"):
        planner.add(SeenSample(**(fields | {"group_id": group_id})), 0.0)
    assert not planner.dead(dead(group_id, 0), 0.0)
