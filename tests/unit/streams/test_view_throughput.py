"""Rates, times by state and silence of workers."""

from __future__ import annotations

from rlstreams.streams.views.workers import throughput
from rlstreams.streams.workers import Workers
from tests.factories import (
    NOW_MS,
    worker_report,
)


def reports(*tokens: float, start_s: int = 0, **changes: object) -> list[object]:
    """One report a second."""
    return [
        worker_report(
            counters={"tokens": count}, at_ms=NOW_MS + 1000 * (start_s + index), **changes
        )
        for index, count in enumerate(tokens)
    ]


def fold(view: Workers, events: list[object]) -> None:
    for event in events:
        view.apply(event)  # type: ignore[arg-type]


def test_rates_are_per_second_over_the_window() -> None:
    """Early reports leave the window, so a burst at the start is forgotten."""
    view = Workers()
    fold(view, reports(0, 1000, *range(1010, 1130, 10)))
    assert throughput(view).workers[0].rates["tokens"] == 10.0
    assert view.total("rollout", "tokens") == 1120


def test_totals_are_summed_over_the_workers_of_a_role() -> None:
    view = Workers()
    fold(view, reports(0, 10))
    fold(view, reports(0, 30, worker="rollout-1", instance="r2"))
    fold(view, reports(0, 7, worker="trainer-0", role="trainer", instance="t1"))
    assert view.total("rollout", "tokens") == 40.0
    assert throughput(view).roles == ("rollout", "trainer")


def test_a_restarted_worker_counts_on() -> None:
    """Its new process starts from 0; totals add up and the restart is noted as a kill."""
    view = Workers()
    fold(view, reports(0, 50))
    fold(view, reports(0, 5, start_s=10, instance="r2"))
    state = throughput(view)
    assert view.total("rollout", "tokens") == 55
    assert state.workers[0].rates["tokens"] == 5.0
    assert state.workers[0].restarts == 1
    assert [(r.worker, r.was_clean) for r in state.restarts] == [("rollout-0", False)]


def test_a_worker_that_said_goodbye_restarts_cleanly() -> None:
    """A drain is no kill."""
    view = Workers()
    fold(view, reports(50, state="stopped"))
    fold(view, reports(0, start_s=10, instance="r2"))
    assert throughput(view).restarts[0].was_clean


def test_a_zombies_reports_are_passed_by() -> None:
    """A process that was replaced wakes up and reports once more."""
    view = Workers()
    fold(view, reports(50))
    fold(view, reports(1, start_s=1, instance="r2"))
    fold(view, reports(60, start_s=2))
    assert throughput(view).workers[0].instance == "r2"
    assert view.total("rollout", "tokens") == 51


def test_time_by_state_goes_to_the_state_that_lasted() -> None:
    """The interval between two reports belongs to the earlier one."""
    view = Workers()
    fold(view, reports(0, 0, state="waiting"))
    fold(view, reports(0, start_s=3, state="working"))
    fold(view, reports(0, start_s=4, state="working"))
    assert throughput(view).seconds("rollout") == {"waiting": 3.0, "working": 1.0}


def test_a_worker_without_news_is_silent() -> None:
    """The clock is the newest report of anyone."""
    view = Workers()
    fold(view, reports(0, 10))
    fold(view, reports(0, start_s=60, worker="trainer-0", role="trainer"))
    rollout, trainer = throughput(view).workers
    assert (rollout.state, rollout.rates) == ("silent", {})
    assert trainer.state == "working"


def test_a_host_whose_clock_is_ahead_makes_nobody_silent() -> None:
    """Reports of two hosts, 30 s apart by their clocks, alternate: nobody is behind."""
    view = Workers()
    for second in range(20):
        at_ms = NOW_MS + 1000 * second
        view.apply(worker_report(worker="rollout-0", host="a", at_ms=at_ms))
        view.apply(worker_report(worker="rollout-1", host="b", at_ms=at_ms + 30_000))
        assert {"working"} == {worker.state for worker in throughput(view).workers}


def test_silence_is_noticed_by_the_clock_of_another_host() -> None:
    """One stops; the other one's clock is behind, and still tells that time passes."""
    view = Workers()
    for second in range(10):
        at_ms = NOW_MS + 1000 * second
        if second < 2:
            view.apply(worker_report(worker="rollout-0", host="a", at_ms=at_ms))
        view.apply(worker_report(worker="rollout-1", host="b", at_ms=at_ms - 30_000))
    states = {worker.worker: worker.state for worker in throughput(view).workers}
    assert {"rollout-0": "silent", "rollout-1": "working"} == states
