"""The plan of faults: everything follows from the seed, and everybody has a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.streams.log.crash_points import arm, arm_from
from tests.chaos.plan import (
    AGENTS,
    BROKER,
    RECORDS,
    ROLES,
    SERVER,
    ChaosOptions,
    Fault,
    FaultKind,
    injected_by_step,
    plan,
    points_of,
)

ONCE = (BROKER, RECORDS)
COUNTS = {"prompts": 1, "rollout": 2, "logprob": 1, "trainer": 1, **dict.fromkeys(ONCE, 1)}
SLEEPS = (FaultKind.STOP, FaultKind.ZOMBIE)


def drawn(seed: int, num_faults: int, **more: Any) -> Sequence[Fault]:
    """A plan of faults of every kind."""
    return plan(ChaosOptions(num_faults=num_faults, seed=seed, has_points=True, **more), COUNTS)


def test_a_seed_is_a_plan() -> None:
    """The same seed gives the same faults, another seed others."""
    assert drawn(7, 50) == drawn(7, 50)
    assert drawn(7, 50) != drawn(8, 50)


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    """So a failure of many faults can be looked at with fewer."""
    assert list(drawn(3, 20)) == list(drawn(3, 60))[:20]


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), num_faults=st.integers(1, 40))
def test_every_role_is_struck_equally_often(seed: int, num_faults: int) -> None:
    """Between two roles the difference is one fault at most."""
    counts = Counter(fault.role for fault in drawn(seed, num_faults))
    times = [counts[role] for role in COUNTS]
    assert max(times) - min(times) <= 1


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_faults_are_within_what_may_be_drawn(seed: int) -> None:
    """Victims exist, waits are about the mean, stops are no longer than allowed."""
    options = ChaosOptions(num_faults=40, seed=seed, every_s=4.0, max_stop_s=6.0)
    for fault in plan(options, COUNTS):
        assert fault.ordinal < COUNTS[fault.role]
        assert 2.0 <= fault.wait_s <= 6.0
        assert fault.stop_s <= 6.0
        assert (fault.stop_s > 0) == (fault.kind in SLEEPS)
        assert fault.kind is not FaultKind.POINT
        assert fault.role not in ONCE or fault.kind is not FaultKind.ZOMBIE


def test_model_servers_are_only_killed() -> None:
    """Both of them."""
    faults = plan(ChaosOptions(num_faults=40, has_points=True), {SERVER: 2})
    assert {(SERVER, FaultKind.KILL)} == {(f.role, f.kind) for f in faults}
    assert {"server-0", "server-1"} == {fault.victim for fault in faults}
    assert "SIGKILL to server-0" in {fault.told for fault in faults}


def test_a_plan_can_be_of_kills_alone() -> None:
    """All victims as before, and agents, which are only killed in any plan."""
    options = ChaosOptions(num_faults=40, has_points=True, only_kills=True)
    faults = plan(options, COUNTS | {AGENTS: 1})
    assert {FaultKind.KILL} == {fault.kind for fault in faults}
    assert COUNTS.keys() | {AGENTS} == {fault.role for fault in faults}
    assert {FaultKind.KILL} == {
        fault.kind for fault in plan(ChaosOptions(num_faults=40), {AGENTS: 1})
    }


def test_every_kind_of_fault_comes_up() -> None:
    """Kills, stops on both sides of both timeouts, zombies, crash points of every role."""
    faults = drawn(0, 500)
    assert set(FaultKind) == {fault.kind for fault in faults}
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
    texts = [f.crash_at for f in drawn(1, 200) if f.role == role and f.crash_at]
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
