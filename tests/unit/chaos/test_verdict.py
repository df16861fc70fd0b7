"""From the journal and the log to the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.views.run import RunState
from rlstreams.up.supervisor.fault_hook import EndedRun, RunOutcome, UpOptions
from rlstreams.up.supervisor.fleet import Failure
from rlstreams.up.supervisor.restart import Exited
from rlstreams.workers.config.run import RunConfig
from tests.chaos.plan import (
    BROKER,
    RECORDS,
    SERVER,
    Fault,
    FaultKind,
    Injection,
    Journal,
)
from tests.chaos.verdict import NOT_AUDITED, ChaosReport, report
from tests.factories import steps_redone


def injection(role: str, kind: FaultKind, instance: str = "", **more: Any) -> Injection:
    fault = Fault(number=0, role=role, ordinal=0, kind=kind, wait_s=1.0, **more)
    return Injection(fault=fault, instance=instance, step=1)


def exited(worker: str, instance: str, status: int, seen_s: float, **more: Any) -> Exited:
    values = {"excuse": "as asked", "died_at": "", "was_replaced": False}
    return Exited(
        worker=worker, instance=instance, status=status, seen_s=seen_s, **{**values, **more}
    )


def journal(injections: list[Injection], **more: Any) -> Journal:
    planned = [s.fault for s in injections]
    return Journal(planned=planned, injections=injections, **more)


AUDIT = AuditReport(
    run="run", steps=3, policy_version=3, issued=8, trained=8, evaluated=0, dead_lettered=0, lost=0
)
OPTIONS = UpOptions(config=RunConfig(), command="up", is_resumed=False, is_live=False)


def reported(
    seen: Journal,
    *,
    state: RunState | None = None,
    exits: Sequence[Exited] = (),
    **more: Any,
) -> ChaosReport:
    """The report, 100 s after the begin."""
    values = {
        "outcome": RunOutcome.COMPLETE,
        "failure": None,
        "num_killed": 0,
        "audit": AUDIT,
        **more,
    }
    return report(seen, EndedRun(options=OPTIONS, **values), state or RunState(), exits, 100.0)


def test_a_run_that_nobody_can_audit_proves_nothing() -> None:
    """A replay wrote its steps: the report says so and is not ok."""
    made = reported(journal([]), audit=None)
    assert (made.ok, made.problems) == (False, (NOT_AUDITED,))


def test_what_died_is_counted() -> None:
    """By role and kind; crash points by name, with the processes that they ended."""
    injections = [
        injection("rollout", FaultKind.POINT, "r1", crash_at="commit.before:3"),
        injection(SERVER, FaultKind.KILL),
        injection(BROKER, FaultKind.KILL),
    ]
    exits = [
        exited("rollout-0", "r1", -9, 1.1),
        exited("rollout-0", "r2", -9, 4.0, died_at="commit.before:3"),
    ]
    made = reported(journal(injections), exits=exits, num_killed=3)
    assert ({"commit.before": 1}, 4) == (made.crash_points, made.processes_killed)
    assert {"crash point": 1} == made.faults["rollout"]
    assert {SERVER, BROKER} == {role for role in made.faults if made.faults[role] == {"kill": 1}}


def test_a_zombie_must_notice() -> None:
    """Fenced is well; one that lives on long after it woke is a problem."""
    injections = [
        injection("trainer", FaultKind.ZOMBIE, "t1", stop_s=5.0),
        injection("rollout", FaultKind.ZOMBIE, "r1", stop_s=5.0),
    ]
    exits = [exited("trainer-0", "t1", 75, 8.0, was_replaced=True)]
    made = reported(journal(injections, woken_s={"t1": 6.0, "r1": 7.0}), exits=exits)
    assert {"woken": 2, "fenced": 1, "ended_otherwise": 0, "alive": 1} == made.zombies
    assert ["1 zombies still lived 90 s after they woke up"] == list(made.problems)
    assert not made.ok


def test_fewer_faults_than_asked_are_said() -> None:
    """Never silently: it is a problem, and the way out is named."""
    one = injection("rollout", FaultKind.KILL, "r1")
    made = reported(Journal(planned=[one.fault] * 3, injections=[one]))
    assert "only 1 of 3 faults were possible" in made.problems[0]
    assert "--steps" in made.problems[0]


def test_a_breach_and_a_hang_are_problems() -> None:
    """What stopped the run is named as it was told."""
    failure = Failure(worker="", reason="no step for 90 s", last_lines=())
    (hang,) = reported(journal([]), outcome=RunOutcome.FAILED, failure=failure).problems
    assert "no step for 90 s" == hang
    state = RunState(redone=(steps_redone(first_step=1, last_step=3, num_equal=2),))
    (drift,) = reported(journal([]), state=state).problems
    assert "1 redone steps gave other weights" == drift


def test_an_end_that_no_fault_accounts_for_is_listed() -> None:
    """It may be right, as after an outage, but a reader should see it."""
    exits = [exited("logprob-0", "l1", 1, 3.0, excuse=""), exited("prompts-0", "p", 0, 9.0)]
    made = reported(journal([]), exits=exits)
    assert ["logprob-0 failed (exit 1)"] == list(made.unexplained)


def test_damaged_steps_are_a_breach_unless_they_were_written_on_purpose() -> None:
    """Another breach is one all the same."""
    audit = replace(AUDIT, breach_counts={"unreadable step": 2})
    struck = journal([injection(RECORDS, FaultKind.DAMAGE)])
    assert reported(struck, audit=audit).ok
    (problem,) = reported(journal([]), audit=audit).problems
    assert "its audit found unreadable step" in problem
    both = replace(audit, breach_counts={"unreadable step": 2, "lost": 1})
    (problem,) = reported(struck, audit=both).problems
    assert "its audit found lost" in problem


def test_the_report_is_json_and_text() -> None:
    """All figures in both."""
    made = reported(journal([injection("rollout", FaultKind.KILL, "r1")], seed=5))
    assert made.ok
    told = json.loads(made.to_json())
    assert (True, 5, {"rollout": {"kill": 1}}) == (told["ok"], told["seed"], told["faults"])
    text = "\n".join(made.lines())
    assert "chaos, seed 5: 1 of 1 faults" in text
    assert "nothing broke" in text
