"""The audit's pure core: what the ledger and the rest of the log must agree on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlstreams.schemas.events import ClosedGroups, Prompt, ScoredTrajectory, Trajectory
from rlstreams.streams.audit.classes import Classes
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.report import EXAMPLES_PER_KIND
from rlstreams.streams.log.record import ID_HEADER, Partition, Position, RawRecord
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_loaded,
    prompt,
    prompt_segment,
    redo_drifted,
    scored,
    trainer_started,
    trajectory,
)
from tests.unit.streams.audit_log import (
    CONFIG,
    SIZE,
    Log,
    change_step,
    feed,
    healthy,
    kinds,
    raw_record,
    reached,
    step_of,
)


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
    fold = AuditFold()
    feed(fold, [raw_record("prompts", 0, prompt(group_id="0", sample=0, group_size=1))])
    fold.mark_issued()
    feed(fold, [raw_record("prompts", 1, prompt(group_id="2", sample=0, group_size=1))])
    assert Classes(fold, reached(set(), set())).report().ok


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
    log.roll_out("6", version=1, worker="rollout-2")
    report = log.report()
    assert kinds(report) == {"unknown load": 1}
    assert "rollout-2, never confirmed" in report.breaches[0].detail


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
    for topic, offset in origins_of_trained(healthy()).items():
        log = healthy()
        letter = dead_letter(
            group_id="1", sample=0, origin_topic=topic, origin_partition=0, origin_offset=offset
        )
        log.add("dead-letters", letter)
        assert kinds(log.report()) == {"trained and dead-lettered": 1}, topic


def test_a_dead_letter_about_a_copy_of_a_trained_sample_is_none() -> None:
    """The trainer kept the record that was fine, as it should; the copy counts as a duplicate."""
    log = healthy()
    copy = log.add("scored-trajectories", log.topics["scored-trajectories"][0])
    for name in ({"group_id": "1", "sample": 0}, {"group_id": "", "sample": -1}):
        letter = dead_letter(
            origin_topic="scored-trajectories", origin_partition=0, origin_offset=copy, **name
        )
        log.add("dead-letters", letter)
    report = log.report()
    assert (kinds(report), report.duplicates) == ({}, 1)


def origins_of_trained(log: Log) -> dict[str, int]:
    """Where sample 1/0, which was trained, has its records."""
    found = {}
    for topic in ("prompts", "trajectories", "scored-trajectories"):
        for offset, event in enumerate(log.topics[topic]):
            sample = event.trajectory if isinstance(event, ScoredTrajectory) else event
            assert isinstance(sample, Prompt | Trajectory)
            if (sample.group_id, sample.sample) == ("1", 0):
                found[topic] = offset
    assert len(found) == 3
    return found


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
    assert kinds(log.report()) == {"step missing": 1, "step twice": 1, "version chain": 1}


def test_a_step_must_start_from_the_weights_that_were_made_before() -> None:
    """The chain of hashes breaks, unless a drifted redo says why."""
    log = healthy()
    drifted = redo_drifted(step=2, policy_version=3, epoch=1)
    refs = log.score("6", version=2)
    log.step(3, refs, closed=3, previous_hash=drifted.actual_hash, policy_version=3)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    assert kinds(log.report()) == {"hash chain": 1}
    steps = log.topics["steps"]
    steps.insert(len(steps) - 1, drifted)
    change_step(log, 3, policy_version=4)
    report = log.report()
    assert kinds(report) == {}
    assert report.drifted == 1


def test_a_step_without_a_claim_has_no_bound() -> None:
    """A bound that nobody recorded cannot be proven."""
    log = healthy()
    del log.topics["steps"][0]
    assert kinds(log.report()) == {"false version": 2, "no bound": 2}


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


@pytest.mark.parametrize(("oldest", "found"), [(0, {}), (-1, {}), (-2, {"too stale": 1})])
def test_an_expired_record_is_judged_by_the_ledgers_word(oldest: int, found: object) -> None:
    """Version -1: all of the sample was masked, so nothing of it was trained."""
    log = healthy()
    log.expired = {Partition("scored-trajectories", 0): 3}
    log.hidden = {("scored-trajectories", n) for n in range(3)}
    samples = step_of(log, 2).samples
    aged = replace(samples[0], oldest_policy_version=oldest)
    change_step(log, 2, samples=(aged, samples[1]))
    report = log.report()
    assert kinds(report) == found
    assert report.unproven == 3


def test_an_unreadable_record_still_proves_its_sample_by_its_header() -> None:
    """A poisoned trajectory is in flight until the log-prob worker has set it aside."""
    fold = AuditFold()
    junk = RawRecord(
        position=Position("trajectories", 0, 4),
        offsets=(4,),
        key=b"0",
        value=b"junk",
        headers={ID_HEADER: b"0/0/0"},
    )
    feed(fold, [junk])
    feed(fold, [raw_record("prompts", 0, prompt(group_id="0", sample=0, group_size=1))])
    report = Classes(fold, reached({0}, set())).report()
    assert report.in_flight == {"logprob": 1}
    assert report.unreadable == 1


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


@pytest.mark.parametrize(
    ("topic", "group_id", "sample"),
    [("prompts", "seven", 0), ("prompts", "007", 0), ("trajectories", "0", 1 << 20)],
    ids=["a word", "leading zeros", "sample out of range"],
)
def test_ids_that_cannot_be_ours_are_named(topic: str, group_id: str, sample: int) -> None:
    """They are neither a group number nor an evaluation; nothing is remembered of them."""
    log = healthy()
    make = prompt if topic == "prompts" else trajectory
    log.add(topic, make(group_id=group_id, sample=sample))
    report = log.report()
    assert kinds(report) == {"bad id": 1}
    assert report.breaches[0].id == f"{group_id}/{sample}"


def test_an_evaluation_id_on_a_training_prompt_is_named() -> None:
    """Evaluations are not trained, so such a sample would never end."""
    log = healthy()
    log.issue("e0-9", purpose="train")
    assert kinds(log.report()) == {"bad id": SIZE}


def test_a_purpose_that_is_no_text_is_shown_as_far_as_it_goes() -> None:
    """Skimming does not look into texts, so the audit must not stop at one."""
    purpose = b"\x0aknead"
    raw = raw_record("prompts", 0, prompt(group_id="e0-9", purpose="knead"))
    assert raw.value.count(purpose) == 1
    fold = AuditFold()
    odd = raw._replace(value=raw.value.replace(purpose, b"\x02\xff"))
    fold.take(odd)
    report = Classes(fold, reached(set(), set())).report()
    assert report.breaches[0].detail == "issued for '\ufffd'"


def test_a_step_cannot_train_an_evaluation() -> None:
    """Held-out rows would leak into the weights."""
    log = healthy()
    refs = step_of(log, 2).samples
    change_step(log, 2, samples=(*refs, replace(refs[0], group_id="e0-7")))
    assert kinds(log.report()) == {"bad id": 1}


def test_a_dead_letter_without_a_prompt_is_an_orphan() -> None:
    """It names a sample that nobody issued."""
    log = healthy()
    log.add("dead-letters", dead_letter(group_id="77", sample=0))
    assert kinds(log.report()) == {"never issued": 1}


def test_a_score_without_a_prompt_is_an_orphan() -> None:
    """As a trajectory is."""
    log = healthy()
    log.add("scored-trajectories", scored(trajectory(group_id="77", sample=0)))
    assert kinds(log.report()) == {"never issued": 1}


def test_a_closed_group_without_a_prompt_is_an_orphan() -> None:
    """The trainer dropped what nobody issued."""
    log = healthy()
    event = groups_dropped(
        groups=(dropped_group("9"),), closed=ClosedGroups(watermark=3, above=(9,))
    )
    log.add("steps", event)
    report = log.report()
    assert kinds(report) == {"never issued": 1}
    assert report.breaches[0].id == "9"


def test_a_dead_letter_that_names_no_sample_ends_the_one_at_its_origin() -> None:
    """Its bytes could not be read; its position says which sample it was."""
    log = healthy()
    (first, _) = log.issue("6")
    log.rollout_done.update((first, first + 1))
    letter = dead_letter(
        group_id="", sample=-1, origin_topic="prompts", origin_partition=0, origin_offset=first
    )
    log.add("dead-letters", letter)
    report = log.report()
    assert report.dead_lettered == 1
    assert kinds(report) == {"lost": 1}


def test_a_group_dropped_twice_is_closed_twice() -> None:
    """A group closes once."""
    log = healthy()
    log.add("steps", groups_dropped(groups=(dropped_group("2"),), closed=ClosedGroups(watermark=3)))
    assert kinds(log.report()) == {"closed twice": 1}


def test_a_closed_set_that_forgets_a_group_is_a_breach() -> None:
    """Pacing would hold it open for ever."""
    log = healthy()
    change_step(log, 2, closed=ClosedGroups(watermark=1))
    log.topics["steps"].pop()  # the drop of group 2 had a newer set
    found = log.report()
    assert kinds(found) == {"closed set": 1}
    assert found.breaches[0].id == "1"


def test_a_strangers_huge_numbers_cost_nothing() -> None:
    """Ids, sizes and positions from anywhere: named, and no memory is set aside for them."""
    log = healthy()
    log.add("prompts", prompt(group_id=str(10**17), sample=0, group_size=1 << 40))
    change_step(log, 2, closed=ClosedGroups(watermark=10**15))
    report = log.report()
    assert report.breach_counts["missing group"] == 10**17 - 6
    assert report.breach_counts["missing sample"] == (1 << 16) - 1
