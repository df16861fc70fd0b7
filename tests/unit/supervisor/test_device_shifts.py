"""Shifts on a shared device: who is next, when a shift ends, and what changes a lease."""

from __future__ import annotations

import pytest

from rlstreams.streams.leases import Leases
from rlstreams.up.supervisor.shifts import Demand, next_role, why_recall
from tests.control_events import device_lease

Demands = dict[str, Demand]


def demands(**samples: int) -> Demands:
    return {role: Demand(samples=num) for role, num in samples.items()}


@pytest.mark.parametrize(
    ("asking", "chosen"),
    [
        (demands(), ""),
        (demands(rollout=9, trainer=0), "rollout"),
        (demands(rollout=900, logprob=1), "logprob"),
        (demands(rollout=900, logprob=1, trainer=4), "trainer"),
        ({**demands(trainer=4), "rollout": Demand(samples=0, is_starting=True)}, "rollout"),
    ],
)
def test_the_most_downstream_work_is_next_and_a_start_before_it(
    asking: Demands, chosen: str
) -> None:
    assert next_role(asking) == chosen


@pytest.mark.parametrize(
    ("held_s", "is_idle", "asking", "why"),
    [
        (1.9, True, demands(rollout=1, logprob=9), ""),  # its smallest shift
        (0.0, False, demands(rollout=0, logprob=1), "rollout has nothing to do, logprob waits"),
        (3.0, False, demands(rollout=0, logprob=9), "rollout has nothing to do, logprob waits"),
        (3.0, True, demands(rollout=5, trainer=9), "rollout has nothing to do, trainer waits"),
        (3.0, False, demands(rollout=2, logprob=15), ""),  # its tail is worth finishing
        (3.0, False, demands(rollout=2, logprob=16), "rollout has 2 samples left"),
        (3.0, False, demands(logprob=1, rollout=99), ""),  # upstream work can wait
        (60.0, False, demands(logprob=1, rollout=9), "logprob had its longest shift"),
        (99.0, True, demands(logprob=1, rollout=0), ""),  # nobody else has a use for it
    ],
)
def test_a_shift_ends_for_a_reason(held_s: float, is_idle: bool, asking: Demands, why: str) -> None:
    holder = next(iter(asking))
    limits = {"shift_s": 2.0, "longest_shift_s": 60.0}
    found = why_recall(holder, held_s, asking, **limits, is_idle=is_idle)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_what_does_not_follow_changes_no_lease() -> None:
    """A late word of a process that lost its lease, a second grant, another's release."""
    leases = Leases()
    granted = device_lease(turn=1, state="granted", instance="a")
    assert leases.apply(granted)
    for void in (
        granted,
        device_lease(turn=2, state="granted", instance="b"),
        device_lease(turn=1, state="held", instance="b"),
        device_lease(turn=1, state="released", instance="b"),
    ):
        assert not leases.apply(void)
    assert leases.apply(device_lease(turn=1, state="held", instance="a"))
    assert leases.apply(device_lease(turn=1, state="lost", instance="a"))
    assert not leases.apply(device_lease(turn=1, state="released", instance="a"))
    assert leases.apply(device_lease(turn=2, state="granted", instance="b"))
    assert leases["card"].holder == "trainer-0"


def test_a_log_that_begins_in_the_middle_of_a_shift_is_followed() -> None:
    """Compacted, it may lack what ended that shift; the next shift may begin all the same, once."""
    leases = Leases()
    assert leases.apply(device_lease(turn=5, state="held", instance="a"))
    assert not leases.apply(device_lease(turn=7, state="granted", instance="b"))
    assert leases.apply(device_lease(turn=6, state="granted", instance="b"))
    assert not leases.apply(device_lease(turn=7, state="granted", instance="c"))
    assert leases["card"].is_of("b")
