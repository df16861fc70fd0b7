"""The audit's pure core: weights are made by `steps`, published by its owner, held, then used."""

from __future__ import annotations

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.audit.report import BreachKind
from tests.factories import (
    policy_loaded,
    policy_published,
    policy_segment,
    prompt_segment,
    step_completed,
    steps_redone,
    trainer_started,
    trajectory,
)
from tests.unit.streams.audit_log import CONFIG, Log, change_step, healthy, kinds

OTHER = "b2" * 32


def zombie() -> Log:
    """Epoch 2 has taken over and published again; now epoch 1 wakes up with version 3."""
    log = healthy()
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("policy-versions", policy_published(2, epoch=2))
    log.add("policy-versions", policy_published(3, epoch=1, weight_hash=OTHER))
    return log


def test_a_fenced_epochs_publication_that_nobody_used_is_passed_by() -> None:
    """Counted as void, no breach."""
    report = zombie().report()
    assert kinds(report) == {}
    assert report.void == 1


def test_weights_of_a_fenced_epoch_that_a_worker_holds_are_a_breach() -> None:
    """Somebody accepted what a zombie published."""
    log = zombie()
    log.add("policy-pulls", policy_loaded(3, weight_hash=OTHER))
    report = log.report()
    assert kinds(report) == {"unpublished": 1}
    assert "was published by epoch 1 after it was taken over" in report.breaches[0].detail


def test_weights_of_a_fenced_step_that_a_worker_holds_are_a_breach() -> None:
    """The step itself is void, so its version is nobody's."""
    log = healthy()
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("steps", step_completed(3, weight_hash=OTHER, epoch=1))
    log.add("policy-pulls", policy_loaded(3, weight_hash=OTHER))
    report = log.report()
    assert kinds(report) == {"unpublished": 1}
    assert "was made by epoch 1 after it was taken over" in report.breaches[0].detail


def test_a_version_that_no_step_made_is_a_breach() -> None:
    """Published by the owner, but the ledger knows nothing of it."""
    log = healthy()
    log.publish(3)
    report = log.report()
    assert kinds(report) == {"false version": 1}
    assert "no step made it" in report.breaches[0].detail


def test_a_version_with_another_hash_than_its_step_is_a_breach() -> None:
    """A number never gets a second content."""
    log = healthy()
    log.add("policy-versions", policy_published(2, weight_hash=OTHER))
    report = log.report()
    assert kinds(report) == {"false version": 1}
    assert "`steps` says a1a1a1a1a1a1" in report.breaches[0].detail


def test_a_publisher_that_never_claimed_the_run_is_a_breach() -> None:
    """An epoch of its own invention."""
    log = healthy()
    log.add("policy-versions", policy_published(2, epoch=7))
    report = log.report()
    assert kinds(report) == {"false version": 1}
    assert "never claimed" in report.breaches[0].detail


def test_a_held_version_that_was_never_published_is_a_breach() -> None:
    """Loaded from somewhere else."""
    log = healthy()
    log.add("policy-pulls", policy_loaded(2, load_id="x", weight_hash=OTHER))
    report = log.report()
    assert kinds(report) == {"unpublished": 1}
    assert "never published" in report.breaches[0].detail


def test_one_number_for_two_contents_in_the_ledger_is_a_breach() -> None:
    """Two steps that both claim version 1."""
    log = healthy()
    change_step(log, 2, policy_version=1, weight_hash=OTHER)
    found = kinds(log.report())
    assert found["version twice"] == 1
    assert found["version chain"] == 1


def test_a_step_must_make_the_next_version() -> None:
    """Staleness is counted in versions, so a jump would hide some."""
    log = healthy()
    log.step(3, [], closed=3, policy_version=9)
    report = log.report()
    assert kinds(report) == {"version chain": 1}
    assert report.breaches[0].id == "step 3"


def answered(finished_at_ms: int, **changes: object) -> Trajectory:
    segment = policy_segment(version=1, **changes)
    segments = (prompt_segment(), segment)
    return trajectory(group_id="6", segments=segments, finished_at_ms=finished_at_ms)


def test_weights_must_be_confirmed_before_the_sample_is_done() -> None:
    """By the worker's own clock; a load that comes later proves nothing."""
    log = healthy()
    log.issue("6")
    loaded_ms = policy_loaded(1).loaded_at_ms
    log.add("trajectories", answered(loaded_ms - 60_000))
    report = log.report()
    assert kinds(report) == {"unknown load": 1}
    assert "confirmed 60 s after the sample was done" in report.breaches[0].detail


def test_tokens_must_name_the_hash_that_was_confirmed() -> None:
    """Same worker, load and number, other weights."""
    log = healthy()
    log.issue("6")
    log.add("trajectories", answered(policy_loaded(1).loaded_at_ms, weight_hash=OTHER))
    report = log.report()
    assert [breach.kind for breach in report.breaches] == [BreachKind.UNKNOWN_LOAD]
    assert "confirmed as version 1, a1a1a1a1a1a1" in report.breaches[0].detail


def test_steps_that_were_done_again_are_told() -> None:
    """As the summary of a run says it."""
    log = healthy()
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("steps", steps_redone(first_step=1, last_step=2, num_equal=2))
    report = log.report()
    expected = "steps 1 to 2 were done again from the log: 2 of 2 weight hashes equal"
    passed = "epoch 2 passed over checkpoint 000001-00000002: is damaged"
    assert f"{expected}\n{passed}" == str(report.redone[0])
    assert expected in report.text()
    assert report.ok
