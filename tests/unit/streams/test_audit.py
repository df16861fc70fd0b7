"""The audit's pure core: every sample in one class, and every broken promise found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.events import (
    ClosedGroups,
    Event,
    MaskedSegment,
    PartitionPosition,
    SampleRef,
    StepCompleted,
)
from streams.audit_fold import AuditFold
from streams.audit_report import EXAMPLES_PER_KIND, AuditReport, BreachKind
from streams.record import ID_HEADER, Partition, Position, RawRecord
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_loaded,
    policy_segment,
    prompt,
    prompt_segment,
    redo_drifted,
    sample_ref,
    scored,
    step_completed,
    trainer_started,
    trajectory,
)

CONFIG = json.dumps({"trainer": {"max_staleness": 1}})
SIZE = 2  # samples of a group


class Log:
    """A run's topics in memory, one partition each; written as the roles would."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Event]] = {
            name: []
            for name in (
                "steps",
                "dead-letters",
                "scored-trajectories",
                "trajectories",
                "policy-pulls",
                "prompts",
            )
        }
        self.rollout_done: set[int] = set()
        self.logprob_done: set[int] = set()
        self.expired: dict[Partition, int] = {}
        self.hidden: set[tuple[str, int]] = set()

    def add(self, topic: str, event: Event) -> int:
        self.topics[topic].append(event)
        return len(self.topics[topic]) - 1

    def issue(self, group_id: str, **changes: Any) -> list[int]:
        return [
            self.add(
                "prompts",
                prompt(group_id=group_id, sample=sample, group_size=SIZE, **changes),
            )
            for sample in range(SIZE)
        ]

    def roll_out(self, group_id: str, version: int = 0, **changes: Any) -> list[int]:
        """Issued, and answered under `version`."""
        self.rollout_done.update(self.issue(group_id, **_only(changes, "purpose")))
        segments = (prompt_segment(), policy_segment(version=version))
        return [
            self.add(
                "trajectories",
                trajectory(group_id=group_id, sample=sample, segments=segments, **changes),
            )
            for sample in range(SIZE)
        ]

    def score(self, group_id: str, version: int = 0) -> list[SampleRef]:
        """Issued, answered and scored; gives what a step would say of the samples."""
        offsets = self.roll_out(group_id, version)
        self.logprob_done.update(offsets)
        refs = []
        for sample, offset in enumerate(offsets):
            event = self.topics["trajectories"][offset]
            at = self.add("scored-trajectories", scored(event))
            ref = sample_ref(group_id, sample, offset=at, oldest_policy_version=version)
            refs.append(ref)
        return refs

    def step(self, step: int, refs: list[SampleRef], closed: int, **changes: Any) -> None:
        """A step of these samples; `closed` groups are closed after it."""
        values: dict[str, Any] = {
            "samples": tuple(refs),
            "closed": ClosedGroups(watermark=closed),
            "masked": (),
            "absent": (),
            "positions": (PartitionPosition(topic="scored-trajectories", partition=0, offset=0),),
        }
        self.add("steps", step_completed(step, **{**values, **changes}))

    def report(self) -> AuditReport:
        fold = AuditFold(
            rollout_covers=lambda _, offset: offset in self.rollout_done,
            logprob_covers=lambda _, offset: offset in self.logprob_done,
            expired=self.expired,
        )
        for topic, events in self.topics.items():
            for offset, event in enumerate(events):
                if (topic, offset) not in self.hidden:
                    fold.apply(event, Position(topic, 0, offset))
        return fold.report()


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def healthy() -> Log:
    """Groups 0 and 1 trained, 2 dropped, 3 to 5 in flight at three roles, one evaluation."""
    log = Log()
    log.add("steps", trainer_started(config=CONFIG))
    log.add("policy-pulls", policy_loaded(0))
    log.step(1, log.score("0"), closed=1)
    log.step(2, log.score("1"), closed=2)
    log.score("2")
    dropped = groups_dropped(groups=(dropped_group("2"),), closed=ClosedGroups(watermark=3))
    log.add("steps", dropped)
    log.score("3")
    log.roll_out("4")
    log.issue("5")
    log.logprob_done.update(log.roll_out("e0-7", purpose="evaluate"))
    return log


def kinds(report: AuditReport) -> dict[str, int]:
    return dict(report.breach_counts)


def change_step(log: Log, step: int, **changes: Any) -> None:
    steps = log.topics["steps"]
    for index, event in enumerate(steps):
        if isinstance(event, StepCompleted) and event.step == step:
            steps[index] = replace(event, **changes)


def step_of(log: Log, step: int) -> StepCompleted:
    steps = (e for e in log.topics["steps"] if isinstance(e, StepCompleted))
    return next(event for event in steps if event.step == step)


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


def test_a_group_both_trained_and_dropped_is_a_breach() -> None:
    """A group closes once."""
    log = healthy()
    event = groups_dropped(groups=(dropped_group("1"),), closed=ClosedGroups(watermark=3))
    log.add("steps", event)
    assert kinds(log.report()) == {"trained and dropped": 1}


def test_a_closed_set_that_names_an_open_group_is_a_breach() -> None:
    """Pacing folds the set alone, so it must be what the events closed."""
    log = healthy()
    event = groups_dropped(groups=(), closed=ClosedGroups(watermark=4))
    log.add("steps", event)
    report = log.report()
    assert kinds(report) == {"closed set": 1}
    assert report.breaches[0].id == "3"


def test_a_gap_in_group_numbers_is_a_breach() -> None:
    """Numbers are dense: a gap is a group that was planned and never written."""
    log = healthy()
    log.issue("7")
    report = log.report()
    assert kinds(report) == {"missing group": 1}
    assert report.breaches[0].id == "6"


def test_groups_above_the_mark_need_not_be_dense() -> None:
    """What was issued during the audit may be seen in part."""
    fold = AuditFold(rollout_covers=lambda *_: False, logprob_covers=lambda *_: False)
    fold.apply(prompt(group_id="0", sample=0, group_size=1), Position("prompts", 0, 0))
    fold.mark_issued()
    fold.apply(prompt(group_id="2", sample=0, group_size=1), Position("prompts", 0, 1))
    assert fold.report().ok


def test_a_group_issued_in_part_is_a_breach() -> None:
    """Its siblings would wait for the missing sample for ever."""
    log = healthy()
    log.add("prompts", prompt(group_id="6", sample=0, group_size=SIZE))
    report = log.report()
    assert kinds(report) == {"missing sample": 1}
    assert report.breaches[0].id == "6/1"


def test_records_of_a_sample_that_nobody_issued_are_a_breach() -> None:
    """A trajectory out of nowhere."""
    log = healthy()
    log.add("trajectories", trajectory(group_id="77", sample=0, segments=(prompt_segment(),)))
    assert kinds(log.report()) == {"never issued": 1}


def test_a_trajectory_must_name_a_load_that_its_worker_confirmed() -> None:
    """Nothing is generated before real weights: same worker, load, version and hash."""
    log = healthy()
    log.add("policy-pulls", policy_loaded(1, worker="rollout-1"))
    log.roll_out("6", version=1)
    report = log.report()
    assert kinds(report) == {"unknown load": 1}
    assert "rollout-0/1" in report.breaches[0].detail


def test_a_dead_letter_ends_a_sample_and_its_siblings_are_dropped() -> None:
    """One class each: the dead one is not counted among the dropped."""
    log = healthy()
    log.rollout_done.update(log.issue("6"))
    log.add("dead-letters", dead_letter(group_id="6", sample=0))
    log.add(
        "steps",
        groups_dropped(
            groups=(dropped_group("6", reason="dead_samples"),),
            closed=ClosedGroups(watermark=3, above=(6,)),
        ),
    )
    report = log.report()
    assert kinds(report) == {}
    assert report.dead_lettered == 1
    assert report.dropped == {"dead_samples": 1, "stale": SIZE}


def test_a_dead_letter_for_a_trained_sample_is_a_breach() -> None:
    """A sample ends once."""
    log = healthy()
    log.add("dead-letters", dead_letter(group_id="1", sample=0))
    assert kinds(log.report()) == {"trained and dead-lettered": 1}


def test_events_of_an_epoch_that_was_taken_over_count_for_nothing() -> None:
    """A zombie's step trains nobody twice."""
    log = healthy()
    log.add("steps", trainer_started(epoch=2, config=CONFIG))
    log.step(3, list(step_of(log, 1).samples), closed=3, epoch=1)
    report = log.report()
    assert kinds(report) == {}
    assert report.void == 1
    assert report.steps == 2


def test_steps_are_numbered_without_gaps_and_once() -> None:
    """A second record for a step, and one out of line, are both breaches."""
    log = healthy()
    log.step(2, [], closed=3)
    log.step(5, [], closed=3)
    assert kinds(log.report()) == {"step missing": 1, "step twice": 1}


def test_a_step_must_start_from_the_weights_that_were_made_before() -> None:
    """The chain of hashes breaks, unless a drifted redo says why."""
    log = healthy()
    drifted = redo_drifted(step=2, epoch=1)
    log.step(3, log.score("6", version=1), closed=3, previous_hash=drifted.actual_hash)
    log.add("policy-pulls", policy_loaded(1))
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    assert kinds(log.report()) == {"hash chain": 1}
    steps = log.topics["steps"]
    steps.insert(len(steps) - 1, drifted)
    assert kinds(log.report()) == {}


def test_a_step_without_a_claim_has_no_bound() -> None:
    """A bound that nobody recorded cannot be proven."""
    log = healthy()
    del log.topics["steps"][0]
    assert kinds(log.report()) == {"no bound": 2}


def test_a_second_record_of_a_sample_is_counted_and_skipped() -> None:
    """The first one by offset wins."""
    log = healthy()
    log.roll_out("4", version=3)
    report = log.report()
    assert kinds(report) == {}
    assert report.duplicates == 2 * SIZE


def test_expired_records_are_said_to_be_unproven() -> None:
    """Retention took the bytes; the ledger's own versions are still held against the bound."""
    log = healthy()
    log.expired = {Partition("scored-trajectories", 0): 2, Partition("trajectories", 0): 2}
    log.hidden = {(topic, n) for topic in ("scored-trajectories", "trajectories") for n in (0, 1)}
    report = log.report()
    assert kinds(report) == {}
    assert report.unproven == 2
    assert report.trained == 2 * SIZE


def test_an_unreadable_record_still_proves_its_sample_by_its_header() -> None:
    """A poisoned trajectory is in flight until the log-prob worker has set it aside."""
    fold = AuditFold(rollout_covers=lambda *_: True, logprob_covers=lambda *_: False)
    fold.unreadable(
        RawRecord(
            position=Position("trajectories", 0, 4),
            offsets=(4,),
            key=b"0",
            value=b"junk",
            headers={ID_HEADER: b"0/0/0"},
        )
    )
    fold.apply(prompt(group_id="0", sample=0, group_size=1), Position("prompts", 0, 0))
    report = fold.report()
    assert report.in_flight == {"logprob": 1}
    assert report.unreadable == 1


def test_the_ledger_comes_first() -> None:
    """A fold that knew the samples before their fate would judge them by half of it."""
    fold = AuditFold(rollout_covers=lambda *_: True, logprob_covers=lambda *_: True)
    fold.apply(prompt(), Position("prompts", 0, 0))
    with pytest.raises(ValueError, match="steps"):
        fold.apply(trainer_started(), Position("steps", 0, 0))


def test_a_report_counts_all_breaches_and_shows_the_first_of_each_kind() -> None:
    """The list is bounded, the count is not."""
    log = healthy()
    for number in range(6, 6 + EXAMPLES_PER_KIND):
        log.rollout_done.update(log.issue(str(number)))
    report = log.report()
    assert report.breach_counts == {"lost": EXAMPLES_PER_KIND * SIZE}
    assert len(report.breaches) == EXAMPLES_PER_KIND
    assert f"and {EXAMPLES_PER_KIND * SIZE - EXAMPLES_PER_KIND} more" in report.text()


def test_the_summary_is_one_sentence() -> None:
    """As `up` prints it in its last lines."""
    expected = (
        "2 processes killed, 14 samples issued: trained 4, dropped 2, evaluated 2, in flight 6; "
        "lost 0, trained twice 0 (read from the log)"
    )
    assert expected == healthy().report().line(2)


def test_the_report_is_also_json() -> None:
    """With the verdict in it."""
    values = json.loads(healthy().report().to_json())
    assert values["ok"] is True
    assert values["staleness"] == {"0": 6, "1": 6}
    assert values["breaches"] == []
