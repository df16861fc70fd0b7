"""A live run is audited again and again, each time from where the audit was."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.cli.audit import follow
from rlstreams.streams.audit.auditor import Auditor, audit
from rlstreams.streams.audit.report import AuditReport, Breach, BreachKind
from rlstreams.streams.log.topics import PROMPTS, STEPS
from tests.factories import heartbeat, prompt
from tests.unit.streams.audit_run import NUM_GROUPS, SIZE, Run


def in_flight(report: AuditReport) -> dict[str, int]:
    return dict(report.in_flight)


def test_each_round_sees_how_far_the_samples_came() -> None:
    """Rollout, log-prob, trainer, trained: the same fold reads on."""
    run = Run()
    run.issue()
    with Auditor(run.bus) as auditor:
        assert in_flight(auditor.round(0)) == {"rollout": NUM_GROUPS * SIZE}
        run.roll_out()
        assert in_flight(auditor.round(0)) == {"logprob": NUM_GROUPS * SIZE}
        positions = run.score()
        assert in_flight(auditor.round(0)) == {"trainer": NUM_GROUPS * SIZE}
        run.train(0, positions)
        report = auditor.round(0)
    assert report.ok
    assert report.trained == SIZE
    assert report.staleness == {0: 3 * SIZE}
    assert report == audit(run.bus, settle_s=0)


def test_a_sample_lost_between_two_rounds_is_found() -> None:
    """It was in flight before, and its worker has committed past it since."""
    run = Run()
    run.issue()
    with Auditor(run.bus) as auditor:
        assert auditor.round(0).ok
        run.roll_out(forget="1")
        report = auditor.round(0)
    assert report.breach_counts == {"lost": SIZE}


def test_weights_newer_than_the_steps_that_were_read_are_no_false_alarm() -> None:
    """The trainer publishes while the audit reads: versions are looked up in newer steps."""
    run = Run()
    run.issue()
    run.roll_out()
    positions = run.score()

    def while_reading() -> list[Breach]:
        run.train(0, positions)
        run.publish(1)
        return []

    with Auditor(run.bus, hanging=while_reading) as auditor:
        report = auditor.round(0)
        assert report.ok
        assert report.steps == 0
        report = auditor.round(0)
    assert report.ok
    assert report.steps == 1


def test_hanging_transactions_are_breaches() -> None:
    """Whoever can ask the broker names them."""
    run = Run()
    run.issue()
    stuck = Breach(kind=BreachKind.HANGING, id="run.steps[0]", detail="producer id 7")
    with Auditor(run.bus, hanging=lambda: [stuck]) as auditor:
        report = auditor.round(0)
    assert report.breach_counts == {"hanging transaction": 1}
    assert report.breaches == (stuck,)


def test_following_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.issue()
    run.write(STEPS, heartbeat(state="done"))
    with Auditor(run.bus) as auditor:
        assert follow(auditor, settle_s=0, every_s=0, as_json=False) == 0
    assert capsys.readouterr().out.startswith("round 1: ok, 6 samples issued")


def test_following_ends_at_the_first_breach(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.issue()
    run.write(PROMPTS, prompt(group_id="9", sample=0, group_size=1))
    with Auditor(run.bus) as auditor:
        assert follow(auditor, settle_s=0, every_s=0, as_json=False) == 1
    out = capsys.readouterr().out
    assert out.startswith("round 1: BREACH")
    assert "missing group" in out


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=15)
def test_a_healthy_run_is_clean_at_every_moment(seed: int) -> None:
    """Work in any order and in pieces, an audit after each: never a false alarm."""
    chance = random.Random(seed)
    run = Run()
    run.issue()
    rolled, scored = 0, 0
    total = NUM_GROUPS * SIZE
    positions = []
    with Auditor(run.bus) as auditor:
        while scored < total:
            if rolled < total and (rolled == scored or chance.random() < 0.5):
                count = chance.randint(1, total - rolled)
                run.roll_out_some(range(rolled, rolled + count))
                rolled += count
            else:
                count = chance.randint(1, rolled - scored)
                positions += run.score_some(range(scored, scored + count))
                scored += count
            assert auditor.round(0).breach_counts == {}
        run.train(0, positions)
        assert auditor.round(0).breach_counts == {}
