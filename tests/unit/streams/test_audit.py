"""The audit's fold: an example of every breach, and of what looks like one and is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from rlstreams.schemas.events import (
    ClosedGroups,
    MaskedSegment,
    PartitionPosition,
    ScoredTrajectory,
)
from rlstreams.streams.audit.classes import Classes, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.report import EXAMPLES_PER_KIND, BreachKind
from rlstreams.streams.log.record import ID_HEADER, Partition
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_loaded,
    policy_published,
    policy_segment,
    prompt,
    prompt_segment,
    redo_drifted,
    scored,
    step_completed,
    steps_redone,
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
    step_of,
)

OTHER = "b2" * 32
LOADED_MS = policy_loaded(1).loaded_at_ms
OLDEST, NEWEST = -(1 << 63), (1 << 63) - 1
Break = Callable[[Log], object]

# Of each: what breaks the healthy log, the breaches that this is, and what one of them says.
BREACHES: list[tuple[Break, Mapping[str, int], str]] = []


def breach(says: str, /, **counts: int) -> Callable[[Break], Break]:
    """An example of these breaches; `_` stands for a blank."""

    def add(break_it: Break) -> Break:
        BREACHES.append((break_it, {k.replace("_", " "): n for k, n in counts.items()}, says))
        return break_it

    return add


@breach("issued, rollout worker is past it, no trajectory", lost=SIZE)
def _(log: Log) -> None:
    log.rollout_done.update(log.issue("6"))


@breach("rolled out, log-prob worker is past it, no score", lost=SIZE)
def _(log: Log) -> None:
    log.logprob_done.update(log.roll_out("6"))


@breach("scored, below the trainer's positions, its group open", lost=SIZE)
def _(log: Log) -> None:
    end = len(log.topics["scored-trajectories"])
    at = PartitionPosition(topic="scored-trajectories", partition=0, offset=end)
    change_step(log, 2, positions=(at,))


@breach("its group was trained in step 2 without it, no reason given", lost=1)
def _(log: Log) -> None:
    change_step(log, 2, samples=step_of(log, 2).samples[:1])


@breach("groups reach 7", missing_group=1)
def _(log: Log) -> None:
    log.issue("7")


@breach("group of 2, this one was never issued", missing_sample=1)
def _(log: Log) -> None:
    log.add("prompts", prompt(group_id="6", sample=0, group_size=SIZE))


@breach("records, but no prompt", never_issued=1)
def _(log: Log) -> None:
    log.add("trajectories", trajectory(group_id="77", sample=0, segments=(prompt_segment(),)))


@breach("records, but no prompt", never_issued=1)
def _(log: Log) -> None:
    log.add("dead-letters", dead_letter(group_id="77", sample=0))


@breach("closed, but no prompt", never_issued=1)
def _(log: Log) -> None:
    closed = ClosedGroups(watermark=3, above=(9,))
    log.add("steps", groups_dropped(groups=(dropped_group("9"),), closed=closed))


@breach("again in step 2", trained_twice=1, closed_twice=1)
def _(log: Log) -> None:
    change_step(log, 2, samples=(*step_of(log, 2).samples, step_of(log, 1).samples[0]))


@breach("again in step 2", trained_twice=1)
def _(log: Log) -> None:
    samples = step_of(log, 2).samples
    change_step(log, 2, samples=(*samples, samples[0]))


@breach("trained in step 2, then dropped (stale)", trained_and_dropped=1)
def _(log: Log) -> None:
    log.add("steps", groups_dropped(groups=(dropped_group("1"),), closed=ClosedGroups(watermark=3)))


@breach("dropped (stale), then again (stale)", closed_twice=1)
def _(log: Log) -> None:
    log.add("steps", groups_dropped(groups=(dropped_group("2"),), closed=ClosedGroups(watermark=3)))


@breach("no event closed it", closed_set=1)
def _(log: Log) -> None:
    log.add("steps", groups_dropped(groups=(), closed=ClosedGroups(watermark=4)))


@breach("the set leaves it out", closed_set=1)
def _(log: Log) -> None:
    log.topics["steps"].pop()  # the drop of group 2 had a newer set
    change_step(log, 2, closed=ClosedGroups(watermark=1))


@breach("comes after step 2", step_twice=1, step_missing=1, version_chain=1)
def _(log: Log) -> None:
    log.step(2, [], closed=3)
    log.step(5, [], closed=3)


@breach("started from b2b2b2b2b2b2, made before: a1a1a1a1a1a1", hash_chain=1)
def _(log: Log) -> None:
    log.step(3, [], closed=3, previous_hash=OTHER)


@breach("made version 9, the one before is 2", version_chain=1)
def _(log: Log) -> None:
    log.step(3, [], closed=3, policy_version=9)


@breach("a version number has exactly one content", version_twice=1, version_chain=1)
def _(log: Log) -> None:
    log.topics["policy-versions"].pop()
    log.topics["policy-pulls"].pop()
    change_step(log, 2, policy_version=1, weight_hash=OTHER)
    change_step(log, 2, samples=tuple(step_of(log, 1).samples[:0]))
    log.topics["steps"].insert(
        2, groups_dropped(groups=(dropped_group("1"),), closed=ClosedGroups(watermark=2))
    )


@breach("no claim before it names trainer.max_staleness", no_bound=2, false_version=2)
def _(log: Log) -> None:
    del log.topics["steps"][0]


@breach("version 0 trained on 2, bound 1", too_stale=SIZE)
def _(log: Log) -> None:
    above = ClosedGroups(watermark=3, above=(6,))
    log.step(3, log.score("6", version=0), closed=3)
    change_step(log, 3, closed=above)
    wider = json.dumps({"trainer": {"max_staleness": 9}})  # later, so it excuses nothing
    log.add("steps", trainer_started(epoch=2, next_step=4, config=wider))


@breach("step 2 says version 1, tokens 0", mislabelled=1)
def _(log: Log) -> None:
    first, second = step_of(log, 2).samples
    change_step(log, 2, samples=(replace(first, oldest_policy_version=1), second))


@breach("step 1: scored-trajectories[0]@2 holds 1/0", unknown_position=1)
def _(log: Log) -> None:
    first, second = step_of(log, 1).samples
    change_step(log, 1, samples=(replace(first, offset=2), second))


@breach("step 1: nothing at scored-trajectories[0]@999", unknown_position=1)
def _(log: Log) -> None:
    first, second = step_of(log, 1).samples
    change_step(log, 1, samples=(replace(first, offset=999), second))


@breach("no step made it", false_version=1)
def _(log: Log) -> None:
    log.publish(3)


@breach("`steps` says a1a1a1a1a1a1", false_version=1)
def _(log: Log) -> None:
    log.add("policy-versions", policy_published(2, weight_hash=OTHER))


@breach("by epoch 7, which never claimed the run, policy-versions[0]@3", false_version=1)
def _(log: Log) -> None:
    """It voids none of the true ones: an epoch exists only by a claim."""
    log.add("policy-versions", policy_published(2, epoch=7))
    log.step(3, [], closed=3)
    log.publish(3)


@breach("b2b2b2b2b2b2 was never published", unpublished=1)
def _(log: Log) -> None:
    log.add("policy-pulls", policy_loaded(2, load_id="x", weight_hash=OTHER))


@breach("was published by epoch 1 after it was taken over", unpublished=1)
def _(log: Log) -> None:
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("policy-versions", policy_published(2, epoch=2))
    log.add("policy-versions", policy_published(3, epoch=1, weight_hash=OTHER))
    log.add("policy-pulls", policy_loaded(3, weight_hash=OTHER))


@breach("was made by epoch 1 after it was taken over", unpublished=1)
def _(log: Log) -> None:
    log.add("steps", trainer_started(epoch=2, policy_version=2, config=CONFIG))
    log.add("steps", step_completed(3, weight_hash=OTHER, epoch=1))
    log.add("policy-pulls", policy_loaded(3, weight_hash=OTHER))


@breach("of rollout-2, never confirmed", unknown_load=1)
def _(log: Log) -> None:
    log.add("policy-pulls", policy_loaded(1, worker="rollout-1"))
    log.roll_out("6", version=1, worker="rollout-2")


@breach("confirmed 60 s after the sample was done", unknown_load=1)
def _(log: Log) -> None:
    log.roll_out("6", version=1, finished_at_ms=LOADED_MS - 60_000)
    log.logprob_done.clear()


@breach("confirmed as version 1, a1a1a1a1a1a1", unknown_load=1)
def _(log: Log) -> None:
    segments = (prompt_segment(), policy_segment(version=1, weight_hash=OTHER))
    log.roll_out("6", segments=segments)


@breach("scored-trajectories[0]@0 is not of the trajectory at trajectories[0]@0", forged_score=1)
def _(log: Log) -> None:
    event = log.topics["scored-trajectories"][0]
    assert isinstance(event, ScoredTrajectory)
    better = replace(event.trajectory, reward=9.0)
    log.topics["scored-trajectories"][0] = replace(event, trajectory=better)


@breach("is not of the trajectory at trajectories[0]@99", forged_score=1)
def _(log: Log) -> None:
    event = log.topics["scored-trajectories"][0]
    assert isinstance(event, ScoredTrajectory)
    log.topics["scored-trajectories"][0] = replace(event, trajectory_offset=99)


@breach("a sample ends once", trained_and_dead_lettered=3)
def _(log: Log) -> None:
    for sample, topic in enumerate(("prompts", "trajectories", "scored-trajectories")):
        group, number = divmod(sample, SIZE)
        letter = dead_letter(
            group_id=str(group),
            sample=number,
            origin_topic=topic,
            origin_partition=0,
            origin_offset=sample,
        )
        log.add("dead-letters", letter)


@breach("record at prompts[0]@14", bad_id=1)
def _(log: Log) -> None:
    log.add("prompts", prompt(group_id="007", sample=0))


@breach("record at trajectories[0]@12", bad_id=1)
def _(log: Log) -> None:
    log.add("trajectories", trajectory(group_id="0", sample=1 << 20))


@breach("issued for 'train'", bad_id=SIZE)
def _(log: Log) -> None:
    log.issue("e0-9", purpose="train")


@breach("not a training group, yet trained in step 2", bad_id=1)
def _(log: Log) -> None:
    refs = step_of(log, 2).samples
    change_step(log, 2, samples=(*refs, replace(refs[0], group_id="e0-7")))


@breach("trained in step 2", bad_id=1)
def _(log: Log) -> None:
    """Its siblings are trained."""
    refs = step_of(log, 2).samples
    change_step(log, 2, samples=(*refs, replace(refs[0], sample=1 << 16)))


@pytest.mark.parametrize(("break_it", "expected", "says"), BREACHES)
def test_a_breach_is_named(break_it: Break, expected: Mapping[str, int], says: str) -> None:
    """Its kind and number; one of them says what is wrong."""
    log = healthy()
    break_it(log)
    report = log.report()
    assert kinds(report) == {k.replace("and dead ", "and dead-"): n for k, n in expected.items()}
    assert any(says in one.detail for one in report.breaches), report.text()
    assert not report.ok


def test_every_kind_has_an_example() -> None:
    """But for two, which need a bus."""
    shown = {kind.replace("and dead ", "and dead-") for _, counts, _ in BREACHES for kind in counts}
    others = {BreachKind.HANGING.value, BreachKind.UNREADABLE_STEP.value}
    assert {kind.value for kind in BreachKind} == shown | others


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


# A damaged prompt; it once ended an audit.
DAMAGED = bytes.fromhex(
    "c301a1d93795274f979e04353902100a747261696e0a696e74617758010000000600000068000000080000006800"
    "00000d0000006800000008000000680000000a0000006b0000008001373434313931323934306632313465613736"
    "3864383233396465366436383665353838336166666338306637643765656137333137393361613031333636613061"
    "3114322b342b392b342b363d043235047b7d9017000c000000daeda0ccc06800"
)


@pytest.mark.parametrize(
    "value", [DAMAGED, DAMAGED[:60], b"", b"junk", DAMAGED[:10] + b"\xff" * 90]
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
    first, third = (prompt(group_id=group, sample=0, group_size=1) for group in "02")
    feed(fold, [raw_record("prompts", 0, first)])
    fold.mark_issued()
    feed(fold, [raw_record("prompts", 1, third)])
    assert Classes(fold, Reached({}, {})).report().ok


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
