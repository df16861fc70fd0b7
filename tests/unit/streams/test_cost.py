"""What a run cost, of a log with known times: every figure is computed here by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rlstreams.schemas.events import ClosedGroups, Event
from rlstreams.show.metrics.figures import of_cost
from rlstreams.show.metrics.prometheus import families
from rlstreams.streams.log.record import Position
from rlstreams.streams.views.cost import CostState
from rlstreams.streams.views.feed import Views
from rlstreams.streams.workers import Death
from rlstreams.up.supervisor.summary import cost_lines
from tests import factories
from tests.factories import NOW_MS


def at(seconds: float) -> int:
    return NOW_MS + round(1000 * seconds)


def report(seconds: float, instance: str, role: str = "rollout", **changes: Any) -> Event:
    worker = changes.pop("worker", f"{role}-0")
    state = changes.pop("state", "working")
    return factories.worker_report(
        worker=worker,
        role=role,
        instance=instance,
        state=state,
        at_ms=at(seconds),
        counters=changes,
    )


def step(number: int, begin_s: float, end_s: float, *groups: str, **changes: Any) -> Event:
    refs = tuple(factories.sample_ref(name, sample) for name in groups for sample in (0, 1))
    values: dict[str, Any] = {"absent": (), "masked": (), "closed": ClosedGroups(watermark=0)}
    return factories.step_completed(
        number, samples=refs, started_at_ms=at(begin_s), finished_at_ms=at(end_s),
        **{**values, **changes},
    )  # fmt: skip


def answer(group: str, sample: int, tokens: int, seconds: float, instance: str = "r1") -> Event:
    return factories.trajectory(
        group_id=group, sample=sample, group_size=2, instance=instance,
        segments=(factories.prompt_segment(), factories.policy_segment(tokens)),
        finished_at_ms=at(seconds),
    )  # fmt: skip


WORK: tuple[Event, ...] = (
    factories.trainer_started(step_target=3),
    *(answer(str(group), sample, 10, 1) for group in (0, 1) for sample in (0, 1)),
    report(2, "r1", samples=4, tokens=40, sampled_tokens=52),  # the last that anybody saw of r1
    report(2, "l1", "logprob", samples=4),
    step(1, 2, 4, "0"),
    # r1 is killed: 12 tokens were under way. Its successor holds weights long before it has done
    # anything.
    report(5, "r2", state="starting"),
    report(6, "r2", sampled_tokens=7, pulls=1),
    answer("2", 0, 30, 8.5, "r2"),
    report(9, "r2", samples=1, tokens=30, sampled_tokens=37),
    # Both trainers that came after t1 did nothing before t3.
    report(4, "t1", "trainer", steps=1, samples=2),
    report(6, "t2", "trainer", state="starting"),
    report(7, "t3", "trainer", state="starting"),
    report(8, "t3", "trainer", micro_batches=4),
    factories.trainer_started(epoch=2, instance="t3", step_target=3, next_step=2, policy_version=1),
    step(2, 9, 12, "1", epoch=1, instance="t1"),  # void: it is none of the work
    step(2, 10, 14, "1", epoch=2, instance="t3"),
    # Of group 2 one is dead and one dropped for it, group 3 is stale, of group 4 all is open.
    factories.dead_letter(group_id="2", sample=0, role="logprob", at_ms=at(15)),
    answer("2", 1, 5, 15, "r2"),
    answer("3", 0, 3, 15, "r2"),
    answer("4", 0, 100, 15, "r2"),
    factories.groups_dropped(
        epoch=2, closed=ClosedGroups(watermark=4),
        groups=(
            factories.dropped_group("2", reason="dead_samples"), factories.dropped_group("3"),
        ),
    ),
    report(16, "r2", samples=4, tokens=138, sampled_tokens=150),
    report(16, "l2", "logprob"),  # came back, and has had nothing to do
)  # fmt: skip


def folded(*events: Event) -> Views:
    views = Views()
    for offset, event in enumerate(events):
        views.apply(event, Position("steps", 0, offset))
    return views


def test_every_figure_is_what_the_log_says() -> None:
    found = folded(*WORK).state.cost
    assert (found.training_s, found.wall_s) == (2 + 4, 16 - 2)  # it goes on: up to the last report
    assert found.sampled_tokens == 52 + 150
    assert found.in_vain == {"died": 12, "dead_letter": 30, "dead_samples": 5, "stale": 3}
    times = {(death.role, death.instance): death.seconds for death in found.deaths}
    assert times == {
        ("rollout", "r1"): 8.5 - 2,
        ("trainer", "t1"): 14 - 4,
        ("trainer", "t2"): 14 - 6,
        ("logprob", "l1"): None,
    }
    back = found.comebacks
    assert (back["trainer"].median_s, back["trainer"].worst_s, back["trainer"].away) == (9, 10, 0)
    assert (back["logprob"].deaths, back["logprob"].away) == (1, 1)
    assert math.isnan(back["logprob"].median_s)


def test_a_run_that_is_over_ends_with_its_last_step_and_what_was_stopped_is_unfinished() -> None:
    """An hour later somebody still reports; of r2, which said goodbye, 12 tokens are missing."""
    over = step(3, 16, 18, "4", epoch=2, instance="t3")
    found = folded(
        *WORK, over,
        report(17, "r2", state="stopped", samples=4, tokens=138, sampled_tokens=150),
        report(3600, "t3", "trainer", state="stopped"),
    ).state.cost  # fmt: skip
    assert (found.training_s, found.wall_s) == (2 + 4 + 2, 18 - 2)
    assert found.in_vain["unfinished"] == 12


def test_the_order_between_topics_changes_nothing() -> None:
    """Steps are read before the answers that they trained, as the page reads them."""
    small = [event for event in WORK if type(event).__name__ != "Trajectory"]
    answers = [event for event in WORK if type(event).__name__ == "Trajectory"]
    assert folded(*small, *answers).state.cost == folded(*WORK).state.cost


def test_calls_of_agents_that_were_answered_from_the_log_were_not_lost() -> None:
    """r1 had sampled 52 and closed sessions of 40; of the rest, 9 tokens were replayed. Of 20
    tokens beside an agent's path no sample has any."""
    more = report(17, "r2", samples=4, tokens=138, sampled_tokens=150, tokens_replayed=9,
                  tokens_off_path=20)  # fmt: skip
    found = folded(*WORK, more).state.cost.in_vain
    assert (found["died"], found["off_path"]) == (3, 20)


def test_the_same_figures_stand_on_the_page_at_the_end_of_up_and_in_a_scrape() -> None:
    state = folded(*WORK).state
    (line,) = cost_lines(state)
    assert line == (
        "42.9 % of the time was training; 24.8 % of 202 tokens sampled in vain: dead letter 30, "
        "dead samples 5, died 12, stale 3; 1 death of a logprob process with no work after "
        "it; 6.5 s from the death of a rollout process to its next work; 9.0 s "
        "from the death of a trainer process to its next work (median of 2, worst 10.0 s)"
    )
    assert line == "; ".join(f"{figure.value} {figure.name}" for figure in of_cost(state))
    scraped = {family.name: family.values for family in families(state)}
    assert scraped["training_share"][()] == pytest.approx(6 / 14)
    assert scraped["tokens_in_vain"][("stale",)] == 3
    assert scraped["back_at_work_seconds"][("trainer", "max")] == 10
    assert scraped["deaths"] == {("logprob",): 1, ("rollout",): 1, ("trainer",): 2}


def test_before_the_first_step_nothing_is_claimed() -> None:
    state = folded(WORK[0]).state
    assert state.cost == CostState()
    assert cost_lines(state) == ()
    told = [figure.value for figure in of_cost(replace(state, cost=CostState()))]
    assert told == ["-", "-"]


def test_a_clock_that_was_set_back_makes_no_time_below_zero() -> None:
    """The return is counted; the hour that lies between two clocks is no time of it."""
    deaths = tuple(
        Death(worker="rollout-0", role="rollout", instance="r1", at_ms=at(0), worked_ms=at(seconds))
        for seconds in (3, -3597)
    )
    (found,) = CostState(deaths=deaths).comebacks.values()
    assert (0, 3.0, 3.0) == (found.away, found.median_s, found.worst_s)
    (unknown,) = CostState(deaths=deaths[1:]).comebacks.values()
    assert unknown.away == 0
    assert math.isnan(unknown.median_s)
