"""The audit's pure core: every sample in one class, and every broken promise found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlstreams.schemas.events import ClosedGroups, MaskedSegment, PartitionPosition
from rlstreams.streams.audit.report import BreachKind
from tests.factories import (
    policy_segment,
    prompt_segment,
    scored,
    trainer_started,
    trajectory,
)
from tests.unit.streams.audit_log import SIZE, change_step, healthy, kinds, step_of


def test_every_sample_of_a_healthy_log_is_in_one_class() -> None:
    """Trained, dropped, evaluated, and in flight at each of three roles."""
    report = healthy().report()
    assert kinds(report) == {}
    assert report.ok
    assert report.issued == 7 * SIZE
    assert report.trained == 2 * SIZE
    assert report.dropped == {"stale": SIZE}
    assert report.evaluated == SIZE
    assert report.in_flight == {"logprob": SIZE, "rollout": SIZE, "trainer": SIZE}
    assert (report.lost, report.trained_twice, report.dead_lettered) == (0, 0, 0)


def test_staleness_is_measured_on_the_tokens() -> None:
    """Step 1 trained version 0 on version 0, step 2 on version 1: three tokens a sample."""
    report = healthy().report()
    assert report.staleness == {0: 3 * SIZE, 1: 3 * SIZE}
    assert report.max_staleness == 1


def test_a_missing_trajectory_is_a_lost_sample() -> None:
    """The rollout group has committed past a prompt that left nothing behind."""
    log = healthy()
    log.rollout_done.update(log.issue("6"))
    report = log.report()
    assert kinds(report) == {"lost": SIZE}
    assert report.lost == SIZE
    assert {breach.id for breach in report.breaches} == {"6/0", "6/1"}
    assert "no trajectory" in report.breaches[0].detail


def test_a_missing_score_is_a_lost_sample() -> None:
    """The log-prob group has committed past a trajectory that left nothing behind."""
    log = healthy()
    log.logprob_done.update(log.roll_out("6"))
    assert kinds(log.report()) == {"lost": SIZE}


def test_a_scored_sample_below_the_trainers_positions_is_lost() -> None:
    """Its group is open, but a restarted trainer would start reading above it."""
    log = healthy()
    end = len(log.topics["scored-trajectories"])
    positions = (PartitionPosition(topic="scored-trajectories", partition=0, offset=end),)
    change_step(log, 2, positions=positions)
    report = log.report()
    assert kinds(report) == {"lost": SIZE}
    assert report.in_flight.get("trainer", 0) == 0


def test_a_sample_left_out_of_its_step_without_a_reason_is_lost() -> None:
    """A group closed without one of its samples, and nobody says why."""
    log = healthy()
    change_step(log, 2, samples=step_of(log, 2).samples[:1])
    assert kinds(log.report()) == {"lost": 1}


def test_a_sample_in_two_steps_is_trained_twice() -> None:
    """The same sample at two places of the ledger."""
    log = healthy()
    again = step_of(log, 1).samples[0]
    change_step(log, 2, samples=(*step_of(log, 2).samples, again))
    report = log.report()
    assert report.trained_twice == 1
    assert kinds(report) == {"closed twice": 1, "trained twice": 1}


def test_a_sample_twice_in_one_step_is_trained_twice() -> None:
    """One batch holds the same sample in two places."""
    log = healthy()
    samples = step_of(log, 2).samples
    change_step(log, 2, samples=(*samples, samples[0]))
    assert kinds(log.report()) == {"trained twice": 1}


def test_a_too_stale_segment_is_found_in_the_records() -> None:
    """Version 0 trained on version 2 under a bound of 1, whatever the ledger claims."""
    log = healthy()
    log.step(3, log.score("6", version=0), closed=3)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    report = log.report()
    assert kinds(report) == {"too stale": SIZE}
    assert report.staleness == {0: 3 * SIZE, 1: 3 * SIZE, 2: 3 * SIZE}


def test_a_masked_segment_may_be_too_stale() -> None:
    """It gave no gradient, so it breaks no bound."""
    log = healthy()
    refs = log.score("6", version=0)
    masked = tuple(
        MaskedSegment(group_id="6", sample=sample, segment=1, staleness=2) for sample in range(SIZE)
    )
    log.step(3, refs, closed=3, masked=masked)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    report = log.report()
    assert kinds(report) == {}
    assert report.masked_segments == SIZE


def test_a_segment_without_tokens_trains_nothing() -> None:
    """An answer that was interrupted before its first token under the old version."""
    log = healthy()
    segments = (
        prompt_segment(),
        policy_segment(0, version=0, finish_reason="policy_changed"),
        policy_segment(version=2),
    )
    refs = log.score("6", version=2, segments=segments)
    log.step(3, refs, closed=3)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    report = log.report()
    assert kinds(report) == {}
    assert report.staleness == {0: 3 * SIZE + 3 * SIZE, 1: 3 * SIZE}


def test_the_bound_is_that_of_the_claim_before_the_step() -> None:
    """A later claim with a wider bound does not excuse an earlier step."""
    log = healthy()
    log.step(3, log.score("6", version=0), closed=3)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    wider = json.dumps({"trainer": {"max_staleness": 9}})
    log.add("steps", trainer_started(epoch=2, next_step=4, config=wider))
    assert kinds(log.report()) == {"too stale": SIZE}


def test_a_ledger_that_names_another_version_than_the_tokens_is_mislabelled() -> None:
    """oldest_policy_version is recomputed, not believed."""
    log = healthy()
    samples = step_of(log, 2).samples
    change_step(log, 2, samples=(replace(samples[0], oldest_policy_version=1), samples[1]))
    assert kinds(log.report()) == {"mislabelled": 1}


@pytest.mark.parametrize(
    ("offset", "detail"), [(2, "holds 1/0"), (999, "nothing at")], ids=["other sample", "beyond"]
)
def test_a_trained_sample_must_lie_where_the_ledger_says(offset: int, detail: str) -> None:
    """Another sample at its position, or none."""
    log = healthy()
    samples = step_of(log, 1).samples
    change_step(log, 1, samples=(replace(samples[0], offset=offset), samples[1]))
    change_step(log, 2, samples=(replace(step_of(log, 2).samples[0], offset=0),))
    report = log.report()
    found = [b for b in report.breaches if b.kind is BreachKind.UNKNOWN_POSITION]
    assert any(detail in breach.detail for breach in found)


def test_the_order_of_topics_does_not_matter() -> None:
    """A live audit sees a sample's records before the step that trains it."""
    log = healthy()
    log.step(3, log.score("6", version=0), closed=3)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    assert log.report(steps_last=True) == log.report()


def test_a_trained_sample_of_two_scored_records_is_measured_once() -> None:
    """The step names one of them; the other is a duplicate and says nothing."""
    log = healthy()
    log.add("scored-trajectories", log.topics["scored-trajectories"][0])
    report = log.report(steps_last=True)
    assert kinds(report) == {}
    assert report.staleness == {0: 3 * SIZE, 1: 3 * SIZE}
    assert report.duplicates == 1
    (named,) = report.named_duplicates
    assert named.startswith("0/0 again at scored-trajectories[0]@")


def test_a_stranger_in_a_trained_group_moves_nobody() -> None:
    """The group takes more room because of it, in the batch that its samples are in."""
    log = healthy()
    refs = log.score("6", version=2)
    log.step(3, refs, closed=3)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    expected = log.report()
    assert kinds(expected) == {}
    log.add("scored-trajectories", scored(trajectory(group_id="6", sample=40)))
    report = log.report()
    assert kinds(report) == {"never issued": 1}
    assert report.staleness == expected.staleness
