"""The audit of a branch: its samples are its own, and it begins where its parent stood."""

from __future__ import annotations

from typing import Any

import pytest

from rlstreams.streams.audit.report import BreachKind
from tests.branch_events import run_branched
from tests.factories import trainer_started
from tests.unit.streams.audit_log import CONFIG, SIZE, Log, kinds
from tests.unit.streams.test_judge import judged

HASH, OTHER = "a1" * 32, "b2" * 32


def branch(*, number: int = 4, group: str = "7", closed: int = 10, **changes: Any) -> Log:
    """Behind step 3 of its parent, which closed groups 0 to 6, 8 and 9: it trains group 7, which
    was open there, and has issued 10 and 11."""
    log = Log()
    log.add("steps", run_branched())
    claim = trainer_started(config=CONFIG, policy_version=3, next_step=4)
    log.add("steps", claim)
    log.publish(3)
    trained = log.score(group, 3)
    log.score("10", 3)
    log.issue("11")
    log.step(number, trained, closed=closed, **changes)
    log.publish(number)
    return log


def test_a_healthy_branch_is_clean_and_says_where_it_begins() -> None:
    """None of its parent's groups is missing, and none of its samples is counted."""
    log = branch()
    report = log.report()
    assert kinds(report) == {}
    assert (3 * SIZE, SIZE) == (report.issued, report.trained)
    assert {"rollout": SIZE, "trainer": SIZE} == report.in_flight
    first, second, *_ = report.text().splitlines()
    assert "audit of run run, from its topics alone" == first
    assert f"begins at step 3 of run parent, weights {HASH}" == second
    assert "in 1 step\n" in report.text()
    assert kinds(log.report(steps_last=True)) == {}
    assert {"trained": SIZE, "in flight": 2 * SIZE} == judged(log).classes
    log.add("steps", run_branched(step=9, weight_hash=OTHER))
    late = log.report()
    assert (1, {}) == (late.void, kinds(late))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"previous_hash": OTHER}, BreachKind.HASH_CHAIN),
        ({"number": 5}, BreachKind.STEP_MISSING),
        ({"policy_version": 5}, BreachKind.VERSION_CHAIN),
        ({"group": "8"}, BreachKind.CLOSED_TWICE),
        ({"group": "3"}, BreachKind.CLOSED_TWICE),
        ({"closed": 11}, BreachKind.CLOSED_SET),
        ({"closed": 8}, BreachKind.CLOSED_SET),
    ],
)
def test_what_does_not_follow_from_its_parent_is_a_breach(
    changes: dict[str, Any], kind: BreachKind
) -> None:
    """Other weights, a step or a version left out, and what the parent had closed."""
    assert kind in kinds(branch(**changes).report())
