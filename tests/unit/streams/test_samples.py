"""The one fold of samples, against a plain reading of the whole log and against the audit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import ClosedGroups, Trajectory
from rlstreams.streams.audit.classes import Classes
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.samples.fold import ALL, OPEN, Samples
from rlstreams.streams.samples.life import EndedCount, Outcome
from rlstreams.streams.segments import num_sampled
from rlstreams.streams.views.flow import cut_shares
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_segment,
    prompt,
    prompt_segment,
    scored,
    step_completed,
    trajectory,
)
from tests.unit.streams.audit_log import feed
from tests.unit.streams.random_log import SIZE, RandomLog, Replay, random_log

seeds = st.integers(0, 2**32)


def folded(log: RandomLog, keeps: int = ALL) -> Samples:
    samples = Samples(keeps=keeps)
    for position, event in log.interleaved():
        samples.apply(event, position)
    return samples


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_every_sample_has_the_outcome_that_the_whole_log_says(seed: int) -> None:
    """In any order between partitions: outcome, step, reward of the first record, why not."""
    log = random_log(seed)
    plain, samples = Replay(log), folded(log)
    names = {(s.group.id, s.number): s for s in samples}
    assert {name: plain.outcome(name) for name in plain.prompts} == {
        name: str(sample.outcome) for name, sample in names.items()
    }
    for name, sample in names.items():
        step, ref = plain.trained.get(name, (None, None))
        told = (sample.step, sample.advantage, sample.absent)
        assert told == (
            step and step.step, ref and ref.advantage, plain.absent.get(name, "")
        )  # fmt: skip
        if found := plain.trajectories.get(name):
            assert isinstance(found[1], Trajectory)
            assert (found[1].reward, found[1].finished_at_ms) == (sample.reward, sample.at_ms)


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_counts_and_open_samples_are_those_of_the_whole_log(seed: int) -> None:
    """Also where samples of closed groups are forgotten, as `up` does."""
    log = random_log(seed)
    plain, samples = Replay(log), folded(log, OPEN)
    training = {name for name in plain.prompts if not name[0].startswith("e")}
    early = {
        name for name in plain.dead
        if samples.groups[name[0]].dead_early >> name[1] & 1
    }  # fmt: skip
    done = (plain.trajectories.keys() | plain.trained.keys()) & training
    closed = {name for name in training if plain.is_closed(name[0])}
    waiting = {
        name for name in plain.prompts.keys() - plain.trajectories.keys() - plain.dead
        if not plain.is_closed(name[0])
    }  # fmt: skip
    assert samples.counts["to_roll_out"] == len(waiting)
    assert samples.counts["issued"] == len(plain.prompts)
    assert samples.counts["rolled_out"] == len(plain.trajectories)
    assert samples.counts["scored"] == len(plain.scores)
    assert samples.counts["scorable"] == len(done - early)
    assert samples.counts["closed"] == len((done - early) & closed)
    expected = sorted((int(group), number) for group, number in training - closed)
    assert expected == [(s.group.number, s.number) for s in samples.open]
    assert all(s.outcome == plain.outcome((s.group.id, s.number)) for s in samples.open)
    every = folded(log).open  # the first question: letters that name no sample are about these too
    assert [(s.name, s.outcome) for s in samples.open] == [(s.name, s.outcome) for s in every]
    assert all(not g.samples for g in samples.groups.values() if plain.is_closed(g.id))


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_the_audit_finds_as_many_of_each_class(seed: int) -> None:
    """It folds by itself, topic by topic, from the bytes."""
    log = random_log(seed)
    audit = AuditFold()
    for topic in ("steps", "dead-letters", "scored-trajectories", "trajectories", "prompts"):
        feed(audit, log.raw(topic))
    report, found = Classes(audit, None).report(), Counter(s.outcome for s in folded(log))
    assert report.issued == found.total()
    assert report.trained == found[Outcome.TRAINED]
    assert report.dead_lettered == found[Outcome.DEAD]
    assert sum(report.dropped.values()) == found[Outcome.DROPPED] + found[Outcome.ABSENT]
    assert report.evaluated == found[Outcome.EVALUATED]


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_evaluations_are_those_of_the_whole_log(seed: int) -> None:
    """Each held-out sample once, by its first record; dead is who has no answer. Of several answers
    to a row the best counts."""
    log = random_log(seed)
    plain, samples = Replay(log), folded(log)
    list(samples)
    for version, tally in samples.evaluations.items():
        issued = {name for name in plain.prompts if name[0].startswith(f"e{version}-")}
        answered = issued & plain.trajectories.keys()
        answers: list[Any] = [plain.trajectories[name][1] for name in answered]
        rewards = [answer.reward for answer in answers]
        assert (tally.num_issued, tally.num_answered) == (len(issued), len(answered))
        assert tally.num_dead == len((plain.dead & issued) - answered)
        assert tally.reward == sum(rewards)
        assert tally.tokens == sum(map(num_sampled, answers))
        assert tally.finished_at_ms == max([a.finished_at_ms for a in answers], default=0)
        assert tally.is_right_or_wrong == (0.25 not in rewards)
        best: dict[int, float] = {}
        for answer in (one for one in answers if one.group_size > 1):
            row = int(answer.group_id.partition("-")[2])
            best[row] = max(answer.reward, best.get(row, 0.0))
        assert tally.best == best


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_a_training_sample_ends_once(seed: int) -> None:
    """Letters, steps and drops may name it again; of a closed group all have ended."""
    log = random_log(seed)
    plain, samples, ends = Replay(log), Samples(keeps=ALL, group_size=SIZE), list[EndedCount]()
    samples.listen(ends.append)
    for position, event in log.interleaved():
        samples.apply(event, position)
    list(samples)
    over = {n for n in plain.prompts if plain.is_closed(n[0]) or n in plain.dead}
    assert sum(end.num for end in ends) == sum(not name[0].startswith("e") for name in over)


def test_a_copy_changes_nothing() -> None:
    """`apply` says so, and no number moves: neither of the sample nor of the flow."""
    samples = Samples(keeps=ALL)
    events = (prompt(), trajectory(reward=0.5), scored(), dead_letter())
    assert {True} == {samples.apply(event) for event in events}
    names = ("issued", "rolled_out", "scored", "dead_at_rollout")
    assert [1, 1, 1, 1] == [samples.counts[name] for name in names]
    counts = dict(samples.counts)
    copies = (prompt(issued_at_ms=1), trajectory(reward=1.0), scored(), dead_letter(detail="x"))
    assert {False} == {samples.apply(event) for event in copies}
    assert counts == samples.counts
    assert [0.5] == [one.reward for one in samples if one.number == prompt().sample]


def test_what_is_kept_is_bounded() -> None:
    """Of the newest groups; how many went is told. A closed group costs no sample where only open
    ones are kept."""
    samples, of_open = Samples(keeps=8), Samples()
    for group in range(20):
        for number in range(4):
            for fold in (samples, of_open):
                fold.apply(prompt(group_id=str(group), sample=number))
        drop = groups_dropped(
            groups=(dropped_group(str(group)),), closed=ClosedGroups(watermark=group + 1)
        )
        for fold in (samples, of_open):
            fold.apply(drop)
    assert (8, 72) == (len(list(samples)), samples.num_forgotten)
    assert [] == list(of_open)
    assert 80 == of_open.counts["issued"]


def test_foreign_ids_are_of_nobody() -> None:
    """No group of a run, a number that no group has, a purpose that is not the id's."""
    samples = Samples(keeps=ALL)
    strange = (
        prompt(group_id="07"), prompt(group_id="x"), prompt(sample=-1), prompt(sample=1 << 40),
        trajectory(group_id="e0-0"), prompt(purpose="evaluate"), dead_letter(group_id="x"),
    )  # fmt: skip
    assert not any(samples.apply(event) for event in strange)
    assert [] == list(samples)
    samples.apply(step_completed(1))
    assert {"7"} == {sample.group.id for sample in samples}


def test_of_two_steps_that_train_a_sample_the_first_counts() -> None:
    """The audit names it; here it stays where it was trained first, with what that step says of a
    sample whose own records are gone."""
    samples = Samples(keeps=ALL)
    for number in (1, 2):
        samples.apply(step_completed(number, absent=()))
    assert [(1, 1.0, 2)] * 2 == [(one.step, one.reward, one.version) for one in samples]
    assert samples.counts["closed"] == 2


def test_answers_that_were_cut_are_counted_where_only_open_samples_are_kept() -> None:
    """By the step that trains them; nothing of it is kept but two numbers."""
    samples = Samples(keeps=OPEN)
    for number, ended in enumerate(("length", "stop")):
        segments = (prompt_segment(), policy_segment(finish_reason=ended))
        samples.apply(trajectory(sample=number, segments=segments))
    samples.apply(step_completed(1, absent=()))
    assert {1: 0.5} == cut_shares(samples)
    assert [] == list(samples)
