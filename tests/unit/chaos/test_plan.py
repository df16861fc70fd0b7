"""The plan of faults: everything follows from the seed, and everybody has a turn."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.start.chaos.plan import (
    BROKER,
    RECORDS,
    ROLES,
    SERVER,
    FaultKind,
    FaultSpace,
    injected_by_step,
    plan,
    points_of,
    sweep,
)
from rlstreams.streams.log.crash_points import arm, arm_from

ONCE = (BROKER, RECORDS)
COUNTS = {"prompts": 1, "rollout": 2, "logprob": 1, "trainer": 1, **dict.fromkeys(ONCE, 1)}
SLEEPS = (FaultKind.STOP, FaultKind.ZOMBIE)
ALL = FaultSpace(counts=COUNTS, has_points=True)


def test_a_seed_is_a_plan() -> None:
    """The same seed gives the same faults, another seed others."""
    assert plan(7, 50, ALL) == plan(7, 50, ALL)
    assert plan(7, 50, ALL) != plan(8, 50, ALL)


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    """So a failure of many faults can be looked at with fewer."""
    assert list(plan(3, 20, ALL)) == list(plan(3, 60, ALL))[:20]


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), num_faults=st.integers(1, 40))
def test_every_role_is_struck_equally_often(seed: int, num_faults: int) -> None:
    """Between two roles the difference is one fault at most."""
    counts = Counter(fault.role for fault in plan(seed, num_faults, ALL))
    times = [counts[role] for role in COUNTS]
    assert max(times) - min(times) <= 1


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_faults_are_within_what_may_be_drawn(seed: int) -> None:
    """Victims exist, waits are about the mean, stops are no longer than allowed."""
    space = FaultSpace(counts=COUNTS, every_s=4.0, max_stop_s=6.0)
    for fault in plan(seed, 40, space):
        assert fault.ordinal < COUNTS[fault.role]
        assert 2.0 <= fault.wait_s <= 6.0
        assert fault.stop_s <= 6.0
        assert (fault.stop_s > 0) == (fault.kind in SLEEPS)
        assert fault.kind is not FaultKind.POINT
        assert fault.role not in ONCE or fault.kind is not FaultKind.ZOMBIE


def test_model_servers_are_only_killed() -> None:
    """Both of them; a sweep of crash points passes them by."""
    space = FaultSpace(counts={SERVER: 2}, has_points=True)
    faults = plan(0, 40, space)
    assert {(SERVER, FaultKind.KILL)} == {(f.role, f.kind) for f in faults}
    assert {"server-0", "server-1"} == {fault.victim for fault in faults}
    assert "SIGKILL to server-0" in {fault.told for fault in faults}
    assert [] == list(sweep(0, space))


def test_every_kind_of_fault_comes_up() -> None:
    """Kills, stops on both sides of both timeouts, zombies, crash points of every role."""
    faults = plan(0, 500, ALL)
    assert set(FaultKind) - {FaultKind.ARMED} == {fault.kind for fault in faults}
    stops = [fault.stop_s for fault in faults if fault.stop_s]
    assert [True] * 4 == [
        any(low < stop < high for stop in stops)
        for low, high in ((2, 4), (4, 8), (24, 30), (30, 39))
    ]
    armed = {
        role: {f.crash_at.partition(":")[0] for f in faults if f.role == role} for role in ROLES
    }
    for role in ROLES:
        assert len(armed[role]) > len(points_of(role)) // 2


@pytest.mark.parametrize("role", ROLES)
def test_armed_points_can_be_armed(role: str) -> None:
    """What a plan says is what a worker understands, and a place that its role passes."""
    texts = [f.crash_at for f in plan(1, 200, ALL) if f.role == role and f.crash_at]
    try:
        for text in texts:
            arm_from(text)
    finally:
        arm(None)
    assert {text.partition(":")[0] for text in texts} <= set(points_of(role))


def test_all_faults_strike_before_the_run_ends() -> None:
    """Twelve faults in thirteen steps: one after each but the last."""
    assert list(range(1, 13)) == [injected_by_step(n, 12, 0, 13) for n in range(12)]
    assert [12, 15, 17] == [injected_by_step(n, 3, 10, 20) for n in range(3)]


def test_a_sweep_has_every_point_of_every_role_once() -> None:
    """The broker has none; prefixes choose among them."""
    points = [(fault.role, fault.crash_at.partition(":")[0]) for fault in sweep(0, ALL)]
    assert sorted((role, point) for role in ROLES for point in points_of(role)) == sorted(points)
    chosen = {fault.crash_at.partition(":")[0] for fault in sweep(0, ALL, ["commit", "offsets"])}
    assert {"commit.before", "commit.after", "offsets.before", "offsets.after"} == chosen
