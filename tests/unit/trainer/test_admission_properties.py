"""The planner's invariants, for any history."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.intake.admission import Admission
from tests.unit.trainer.trainer_builders import dead, seen

SIZE = 2
MAX_STALENESS = 1

arrivals = st.tuples(
    st.just("add"),
    st.integers(0, 7),
    st.integers(0, SIZE - 1),
    st.lists(st.integers(0, 5), min_size=1, max_size=2),
)
letters = st.tuples(st.just("dead"), st.integers(0, 7), st.integers(-1, SIZE - 1))
steps = st.tuples(st.sampled_from(["plan", "finish", "drop"]))
histories = st.lists(st.one_of(arrivals, arrivals, arrivals, letters, steps, steps), max_size=80)


def section(on_stale="mask", min_group_samples=0) -> TrainerSection:
    return TrainerSection(
        groups_per_step=2,
        max_staleness=MAX_STALENESS,
        on_stale=on_stale,
        min_group_samples=min_group_samples,
        group_deadline_s=30.0,
    )


def ages_trained(plan) -> list[int]:
    """Staleness of each segment that the plan leaves in the loss."""
    masked = {(m.group_id, m.sample, m.segment) for m in plan.masked}
    return [
        plan.policy_version - segment.policy_version
        for planned in plan.samples
        for segment in planned.seen.segments
        if (planned.seen.group_id, planned.seen.sample, segment.segment) not in masked
    ]


@settings(max_examples=150, deadline=None)
@given(histories, st.sampled_from(["mask", "drop"]), st.integers(0, 2))
def test_invariants(history, on_stale, min_group_samples):
    """No sample is planned twice, none is staler than the bound, closed groups stay closed."""
    planner = Admission(section(on_stale, min_group_samples))
    version, running = 0, None
    closed, planned = set(), set()
    for now_s, (act, *fact) in enumerate(history):
        if act == "add":
            group, sample, versions = fact
            taken = planner.add(seen(group, sample, size=SIZE, versions=versions), now_s)
            assert not (taken and str(group) in closed)
        elif act == "dead":
            planner.dead(dead(*fact), now_s)
        elif act == "drop":
            dropped = {d.group_id for d in planner.drops(version, now_s)}
            assert not dropped & (closed | set(running.group_ids if running else ()))
            planner.close(dropped)
            closed |= dropped
        elif act == "plan" and running is None:
            running = planner.plan(version)
            if running is None:
                continue
            samples = {(p.seen.group_id, p.seen.sample) for p in running.samples}
            assert not samples & planned
            planned |= samples
            assert all(0 <= age <= MAX_STALENESS for age in ages_trained(running))
            assert ages_trained(running)
            assert not (on_stale == "drop" and running.masked)
        elif act == "finish" and running is not None:
            planner.close(running.group_ids)
            closed |= set(running.group_ids)
            running, version = None, version + 1
        in_events = [str(g) in closed for g in range(8)]
        numbers = planner.closed
        assert in_events == [g < numbers.watermark or g in numbers.above for g in range(8)]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 30), min_size=3, max_size=8), st.randoms(use_true_random=False))
def test_arrival_order_does_not_choose(groups, shuffler: random.Random):
    """The same complete groups give the same plans, however their samples came in."""
    samples = [seen(group, sample, size=SIZE) for group in groups for sample in range(SIZE)]
    plans = []
    for _ in range(2):
        shuffler.shuffle(samples)
        planner = Admission(section())
        for sample in samples:
            planner.add(sample, 0.0)
        plans.append([planner.plan(0) for _ in range(len(groups) // 2)])
    assert plans[0] == plans[1]
    assert [str(g) for g in sorted(groups)[:2]] == list(plans[0][0].group_ids)


@settings(max_examples=60, deadline=None)
@given(histories, st.sampled_from(["mask", "drop"]), st.integers(0, 2))
def test_every_open_group_ends(history, on_stale, min_group_samples):
    """After its deadline each group is complete and trainable, or dropped: none waits for ever."""
    planner = Admission(section(on_stale, min_group_samples))
    for act, *fact in history:
        if act == "add":
            planner.add(seen(fact[0], fact[1], size=SIZE, versions=fact[2]), 0.0)
        elif act == "dead":
            planner.dead(dead(*fact), 0.0)
    planner.close([d.group_id for d in planner.drops(2, 1e3)])
    num_plans = 0
    while planner.plan(2):
        num_plans += 1
    assert planner.num_open_groups - 2 * num_plans in (0, 1)
