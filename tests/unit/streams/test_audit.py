"""The audit's fold: what it counts, and what looks like a breach and is none."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pytest

from rlstreams.schemas.events import (
    ClosedGroups,
    MaskedSegment,
)
from rlstreams.streams.audit.classes import Classes, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.report import EXAMPLES_PER_KIND, redone_text
from rlstreams.streams.log.record import ID_HEADER, Partition
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_published,
    policy_segment,
    prompt,
    prompt_segment,
    redo_drifted,
    scored,
    steps_redone,
    trainer_started,
    trajectory,
)
from tests.unit.schemas.test_projection import DAMAGED_PROMPT
from tests.unit.streams.audit_log import (
    CONFIG,
    SIZE,
    Log,
    change_step,
    feed,
    healthy,
    kinds,
    raw_record,
    step_of,
)

OTHER = "b2" * 32
OLDEST, NEWEST = -(1 << 63), (1 << 63) - 1


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
    assert (report.staleness, report.max_staleness) == ({0: 3 * SIZE, 1: 3 * SIZE}, 1)
    expected = (
        "2 processes killed, 14 samples issued: trained 4, dropped 2, evaluated 2, in flight 6; "
        "lost 0, trained twice 0 (read from the log)"
    )
    assert expected == report.line(2)
    assert report.line(1).startswith("1 process killed, ")
    values = json.loads(report.to_json())
    assert (values["ok"], values["breaches"]) == (True, [])
    assert values["staleness"] == {"0": 6, "1": 6}


def test_masked_segments_and_empty_ones_train_nothing() -> None:
    """They gave no gradient, so they break no bound."""
    log = healthy()
    cut = policy_segment(0, version=0, finish_reason="policy_changed")
    segments = (prompt_segment(), cut, policy_segment(version=0))
    masked = tuple(
        MaskedSegment(group_id="6", sample=sample, segment=2, staleness=2) for sample in range(SIZE)
    )
    log.step(3, log.score("6", segments=segments), closed=3, masked=masked)
    change_step(log, 3, closed=ClosedGroups(watermark=3, above=(6,)))
    report = log.report()
    assert kinds(report) == {}
    assert report.masked_segments == SIZE


def test_a_second_record_of_a_sample_is_counted_named_and_skipped() -> None:
    """The first one by offset wins; a score may be of a later trajectory, as that one is."""
    log = healthy()
    log.roll_out("4", version=3)
    at = log.add("trajectories", replace(log.topics["trajectories"][0], reward=0.5))
    copy = scored(log.topics["trajectories"][at], trajectory_offset=at)
    letter = {"origin_topic": "scored-trajectories", "origin_partition": 0}
    at = log.add("scored-trajectories", copy)
    for name in ({"group_id": "0", "sample": 0}, {"group_id": "", "sample": -1}):
        log.add("dead-letters", dead_letter(origin_offset=at, **letter, **name))
    report = log.report()
    assert kinds(report) == {}
    assert report.duplicates == 2 * SIZE + 2
    assert "0/0 again at trajectories[0]@14" in report.named_duplicates


def test_a_dead_letter_ends_a_sample_and_its_siblings_are_dropped() -> None:
    """One class each; a letter that names no sample is about the one at its origin."""
    log = healthy()
    first, second = log.issue("6")
    log.rollout_done.update((first, second))
    log.add("dead-letters", dead_letter(group_id="6", sample=0))
    closed = ClosedGroups(watermark=3, above=(6,))
    event = groups_dropped(groups=(dropped_group("6", reason="dead_samples"),), closed=closed)
    log.add("steps", event)
    report = log.report()
    assert (kinds(report), report.dead_lettered) == ({}, 1)
    assert report.dropped == {"dead_samples": 1, "stale": SIZE}
    origin = {"origin_topic": "prompts", "origin_partition": 0, "origin_offset": second}
    log.add("dead-letters", dead_letter(group_id="", sample=-1, **origin))
    assert log.report().dead_lettered == SIZE


def test_what_an_epoch_writes_after_it_was_taken_over_is_void() -> None:
    """Steps and publications: counted, named by their positions, no breach."""
    log = healthy()
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("policy-versions", policy_published(2, epoch=2))
    log.add("policy-versions", policy_published(3, epoch=1, weight_hash=OTHER))
    log.step(3, list(step_of(log, 1).samples), closed=3, epoch=1)
    report = log.report()
    assert (kinds(report), report.void, report.steps) == ({}, 2, 2)
    assert report.named_void == ("steps[0]@5", "policy-versions[0]@4")


def test_a_drifted_redo_explains_a_hash_and_a_version() -> None:
    """It makes the version that the next step starts from."""
    log = healthy()
    drifted = redo_drifted(step=2, policy_version=3, epoch=1)
    log.add("steps", drifted)
    log.step(3, [], closed=3, previous_hash=drifted.actual_hash, policy_version=4)
    report = log.report()
    assert (kinds(report), report.drifted) == ({}, 1)


def test_expired_records_are_unproven() -> None:
    """Retention took the bytes; the ledger's own versions are still held against the bound."""
    log = healthy()
    log.expired = {Partition(topic, 0): 3 for topic in ("scored-trajectories", "trajectories")}
    log.hidden = {(at.topic, n) for at in log.expired for n in range(3)}
    report = log.report()
    assert (kinds(report), report.unproven, report.trained) == ({}, 3, 2 * SIZE)
    samples = step_of(log, 2).samples
    for oldest, found in ((-1, {}), (-2, {"too stale": 1})):  # -1: all of it was masked
        aged = replace(samples[0], oldest_policy_version=oldest)
        change_step(log, 2, samples=(aged, samples[1]))
        assert kinds(log.report()) == found


def test_what_retention_did_not_take_has_to_be_there() -> None:
    """The first record that it left, too."""
    log = healthy()
    log.expired = {Partition("scored-trajectories", 0): 3}
    log.hidden = {("scored-trajectories", n) for n in range(4)}
    report = log.report()
    assert (kinds(report), report.unproven) == ({"unknown position": 1}, 3)


@pytest.mark.parametrize(
    "value", [DAMAGED_PROMPT, DAMAGED_PROMPT[:60], b"", b"junk", DAMAGED_PROMPT[:10] + b"\xff" * 90]
)
@pytest.mark.parametrize("header", [None, b"", b"3/7", b"7/x", b"7/" + b"9" * 30, b"/"])
def test_a_damaged_record_costs_itself(value: bytes, header: bytes | None) -> None:
    """It is counted and named; its header may say which sample it was, or lack its value."""
    log = healthy()
    expected = log.report()
    at = log.add("prompts", prompt())
    log.damaged["prompts", at] = value, {ID_HEADER: header}  # type: ignore[dict-item]
    report = log.report()
    assert (report.unreadable, len(report.named_unreadable)) == (1, 1)
    assert report.named_unreadable[0].startswith(f"prompts[0]@{at}: ")
    assert report.trained == expected.trained
    assert set(kinds(report)) <= {"bad id"}


def test_an_unreadable_record_still_proves_its_sample_by_its_header() -> None:
    """A poisoned trajectory is in flight until the log-prob worker has set it aside."""
    log = healthy()
    (first, second) = log.issue("6")
    log.rollout_done.update((first, second))
    for sample in range(SIZE):
        at = log.add("trajectories", trajectory())
        log.damaged["trajectories", at] = b"junk", {ID_HEADER: f"6/{sample}/0".encode()}
    report = log.report()
    assert (kinds(report), report.in_flight["logprob"]) == ({}, 2 * SIZE)


def test_a_header_takes_no_samples_place() -> None:
    """Garbage before the true record, under its name, is not its first record; nor does garbage
    make a sample that nobody issued."""
    log = healthy()
    log.rollout_done.update(log.issue("6"))
    for name in (b"6/0/0", b"999/0/0"):
        at = log.add("trajectories", trajectory())
        log.damaged["trajectories", at] = b"junk", {ID_HEADER: name}
    for sample in range(SIZE):
        log.add("trajectories", trajectory(group_id="6", sample=sample, group_size=SIZE))
    report = log.report()
    assert ({}, 2, 0) == (kinds(report), report.unreadable, report.duplicates)


@pytest.mark.parametrize("bound", ["1e20", "-10000000000000000000", "Infinity", "[" * 100_000])
def test_a_bound_of_a_stranger(bound: str) -> None:
    """The claim's configuration is text of its writer."""
    log = healthy()
    log.topics["steps"][0] = trainer_started(config=f'{{"trainer": {{"max_staleness": {bound}}}}}')
    expected = {"1e20": {}, "Infinity": {"no bound": 2}, "-": {"too stale": 2 * SIZE}}
    assert kinds(log.report()) == expected.get(bound, expected.get(bound[0], {"no bound": 2}))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_tokens_of_an_impossible_version(version: int) -> None:
    """However far it is from what the step says."""
    log = Log()
    log.add("steps", trainer_started(config=CONFIG))
    log.publish(0)
    log.publish(1)
    refs = log.score("0", segments=(prompt_segment(), policy_segment(version=version)))
    log.step(1, refs, closed=1)
    assert kinds(log.report()) == {"mislabelled": 2, "too stale": 2, "unknown load": 1}


def test_a_strangers_huge_numbers_cost_nothing() -> None:
    """Ids, sizes and positions from anywhere: counted, and no memory is set aside for them."""
    log = healthy()
    log.add("prompts", prompt(group_id=str(10**17), sample=0, group_size=1 << 40))
    change_step(log, 2, closed=ClosedGroups(watermark=10**15))
    log.topics["steps"].pop()
    report = log.report()
    assert report.breach_counts["missing group"] == 10**17 - 6
    assert report.breach_counts["missing sample"] == (1 << 16) - 1
    assert report.breach_counts["closed set"] == 10**15 - 2
    assert len(report.breaches) == 3 * EXAMPLES_PER_KIND
    assert "and " in report.text().splitlines()[-1]


def test_groups_above_the_mark_need_not_be_dense() -> None:
    """What was issued during the audit may be seen in part."""
    fold = AuditFold()
    second, third, fifth = (prompt(group_id=group, sample=0, group_size=1) for group in "124")
    feed(fold, [raw_record("prompts", 0, second)])
    fold.mark_issued()
    feed(fold, [raw_record("prompts", 1, third), raw_record("prompts", 2, fifth)])
    report = Classes(fold, Reached({}, {})).report()
    assert (report.breach_counts, report.issued) == ({"missing group": 1}, 3)  # 0, not 3


def test_steps_that_were_done_again_are_told() -> None:
    """As the summary of a run says it."""
    log = healthy()
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("steps", steps_redone(first_step=1, last_step=2, num_equal=2))
    report = log.report()
    expected = "steps 1 to 2 were done again from the log: 2 of 2 weight hashes equal"
    passed = "epoch 2 passed over checkpoint 000001-00000002: is damaged"
    assert f"{expected}\n{passed}" == redone_text(report.redone[0])
    assert expected in report.text()
    assert report.ok


def test_memory_is_that_of_samples_not_of_their_tokens() -> None:
    """Records of 20 kB each; what is kept of a sample fits into a fiftieth of one."""
    log, num_groups = Log(), 30
    segments = (prompt_segment(), policy_segment(5_000, version=0))
    for group in range(num_groups):
        log.score(str(group), segments=segments)
    records = [raw for topic in log.topics for raw in log.records(topic)]
    fold = AuditFold()
    tracemalloc.start()
    try:
        feed(fold, records)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / (num_groups * SIZE) < 1_500
