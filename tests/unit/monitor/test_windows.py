"""Windows of time: sums by minute, and the same sums as the views that others show."""

from __future__ import annotations

import pytest

from rlstreams.schemas.events import DroppedGroup, Event
from rlstreams.show.monitor.answers import MINUTE_MS, WindowsView, start_of
from rlstreams.streams.views.run import RunView
from rlstreams.streams.views.workers import PullsView
from tests import factories

BEGIN_MS = start_of(factories.NOW_MS)


def step(number: int, at_ms: int, epoch: int = 1, **changes: object) -> Event:
    values = {
        "epoch": epoch,
        "policy_version": number,
        "staleness": {"0": 30, "2": 10},
        "started_at_ms": at_ms - 500,
        "finished_at_ms": at_ms,
    } | changes
    return factories.step_completed(number, **values)


def drop(reason: str, at_ms: int) -> Event:
    group = DroppedGroup(
        group_id="9", reason=reason, permanent=False, staleness=9, row=0, dataset_epoch=0,
        replacement=0,
    )  # fmt: skip
    return factories.groups_dropped(groups=(group,), epoch=1, dropped_at_ms=at_ms)


def letter(role: str, reason: str, at_ms: int) -> Event:
    return factories.dead_letter(role=role, reason=reason, at_ms=at_ms)


def pull(seconds: float, at_ms: int) -> Event:
    return factories.policy_loaded(role="rollout", seconds=seconds, loaded_at_ms=at_ms)


def report(instance: str, at_ms: int) -> Event:
    return factories.worker_report(worker="rollout-0", instance=instance, at_ms=at_ms)


EVENTS: tuple[Event, ...] = (
    factories.trainer_started(epoch=1, started_at_ms=BEGIN_MS),
    report("a", BEGIN_MS),
    step(1, BEGIN_MS + 1000),
    step(2, BEGIN_MS + 2000),
    pull(0.1, BEGIN_MS + 2500),
    pull(0.2, BEGIN_MS + 2600),
    pull(0.9, BEGIN_MS + 2700),
    drop("stale", BEGIN_MS + 3000),
    letter("rollout", "reward", BEGIN_MS + 4000),
    letter("logprob", "scoring", BEGIN_MS + 5000),
    report("b", BEGIN_MS + MINUTE_MS),
    step(3, BEGIN_MS + MINUTE_MS + 1000),
    letter("rollout", "reward", BEGIN_MS + MINUTE_MS + 30_000),
)


def folded(events: tuple[Event, ...] = EVENTS) -> WindowsView:
    view = WindowsView()
    for event in events:
        view.apply(event)
    return view


def test_a_minute_holds_what_happened_in_it() -> None:
    """By the events' own time."""
    first, second = folded().rows()

    assert {
        "steps": 2,
        "samples": 4,
        "tokens": 32,
        "dropped_groups": {"stale": 1},
        "dead_letters": {"reward": 1, "scoring": 1},
        "pulls": {"rollout": 3},
        "restarts": {},
    } == {name: value for name, value in first.items() if name != "start"}
    assert (1, {"rollout-0": 1}) == (second["steps"], second["restarts"])


def test_the_windows_add_up_to_what_the_views_show() -> None:
    """The monitor says the same as live view, report and metrics."""
    run, pulls = RunView(), PullsView()
    for event in EVENTS:
        run.apply(event)
        pulls.apply(event)
    minutes = folded().rows()

    assert sum(p.num_tokens for p in run.state.steps) == sum(row["tokens"] for row in minutes)
    assert run.state.dropped == minutes[0]["dropped_groups"]
    assert pulls.state.num_pulls == minutes[0]["pulls"]["rollout"]


def test_a_step_that_does_not_count_is_in_no_window() -> None:
    """What a fenced trainer wrote is void here as it is to everybody."""
    zombie = step(3, BEGIN_MS + 4000, epoch=1)
    claim = factories.trainer_started(epoch=2)

    assert [2] == [row["steps"] for row in folded((*EVENTS[:4], claim, zombie)).rows()]


@pytest.mark.parametrize("late_ms", [0, 1])
def test_the_oldest_windows_go(late_ms: int) -> None:
    """As many are kept as were asked for, and what comes later for one that went opens none."""
    view = WindowsView(kept=2)
    for number in range(4):
        view.apply(letter("rollout", "reward", BEGIN_MS + number * MINUTE_MS))
    view.apply(letter("rollout", "reward", BEGIN_MS + late_ms))

    assert [{"reward": 1}] * 2 == [row["dead_letters"] for row in view.rows()]


def test_a_load_counts_whatever_epoch_it_names() -> None:
    """Topics are read beside each other: a load may come before the claim of its trainer."""
    events = (factories.trainer_started(epoch=2), factories.policy_loaded(epoch=1))

    assert 1 == folded(events).rows()[0]["pulls"][events[1].role]
