"""Every breach that an audit names, by an example on a log that is healthy otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from rlstreams.schemas.events import (
    ClosedGroups,
    PartitionPosition,
    ScoredTrajectory,
)
from rlstreams.streams.audit.report import BreachKind
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    heartbeat,
    policy_loaded,
    policy_published,
    policy_segment,
    prompt,
    prompt_segment,
    step_completed,
    trainer_started,
    trajectory,
)
from tests.unit.streams.audit_log import (
    CONFIG,
    SIZE,
    Log,
    change_step,
    healthy,
    kinds,
    step_of,
)
from tests.unit.streams.test_audit_sessions import BREACHES as SESSIONS

OTHER = "b2" * 32
LOADED_MS = policy_loaded(1).loaded_at_ms
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


@breach("trained in step 2, judged by new and old", mixed_code=1)
def _(log: Log) -> None:
    for ref, judge in zip(step_of(log, 2).samples, ("new", "old"), strict=False):
        score = log.topics["scored-trajectories"][ref.offset]
        assert isinstance(score, ScoredTrajectory)
        told = replace(score.trajectory, judged_by=judge)
        log.topics["trajectories"][score.trajectory_offset] = told
        log.topics["scored-trajectories"][ref.offset] = replace(score, trajectory=told)


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


@breach("its trainer did not write this StepCompleted", forged_step=1)
def _(log: Log) -> None:
    """Its number is taken, its samples are not trained."""
    at = len(log.topics["steps"])
    log.add("steps", step_completed(3, weight_hash=OTHER))
    log.add("steps", heartbeat(disowned=(at,)))


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
    """But for two, which need a bus; those of sessions are beside it."""
    every = [*BREACHES, *SESSIONS]
    shown = {kind.replace("and dead ", "and dead-") for _, counts, _ in every for kind in counts}
    others = {BreachKind.HANGING.value, BreachKind.UNREADABLE_STEP.value}
    assert {kind.value for kind in BreachKind} == shown | others
