"""The folds that people look at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlstreams.schemas.events import AbsentSample, ClosedGroups, Trajectory
from rlstreams.schemas.tensor import Tensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.streams.views.evaluation import AnswersView, TokenRun
from rlstreams.streams.views.feed import Feed, Views
from rlstreams.streams.views.workers import NEWEST_PULLS
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_loaded,
    policy_segment,
    prompt,
    prompt_segment,
    pull_requested,
    redo_drifted,
    sample_ref,
    step_completed,
    trainer_started,
    trajectory,
    worker_report,
)
from tests.logs import made_log
from tests.memory.bus import MemoryBus


def answer(
    version: int, row: int = 0, *, sampled: int | None = None, **changes: object
) -> Trajectory:
    """Row `row` answered for the evaluation of `version`, by tokens of version `sampled`."""
    segment = policy_segment(version=version if sampled is None else sampled)
    values = {
        "group_id": f"e{version}-{row}",
        "sample": 0,
        "purpose": "evaluate",
        "segments": (prompt_segment(), segment),
    }
    return trajectory(**{**values, **changes})


def test_a_step_is_folded_with_its_mean_reward() -> None:
    """Ids are left out; rewards are averaged, staleness is keyed by number."""
    view = Views()
    view.apply(trainer_started(step_target=60))
    samples = (sample_ref(sample=0, reward=1.0), sample_ref(sample=1, reward=0.0))
    view.apply(step_completed(1, samples=samples, staleness={"0": 6, "1": 2}))
    state = view.state.run
    assert (state.step, state.step_target, state.policy_version) == (1, 60, 1)
    assert state.steps[0].reward == 0.5
    assert state.steps[0].staleness == {0: 6, 1: 2}
    assert state.steps[0].num_tokens == 16


def test_drops_are_counted_by_reason_and_by_step() -> None:
    """A report says why; a step has those since the one before."""
    view = Views()
    groups = (dropped_group("1"), dropped_group("2"), dropped_group("3", reason="incomplete"))
    view.apply(groups_dropped(groups=groups))
    assert view.state.run.dropped == {"incomplete": 1, "stale": 2}
    view.apply(step_completed(1))
    view.apply(step_completed(2))
    assert [(3, 1), (0, 1)] == [
        (step.num_dropped, step.num_groups) for step in view.state.run.steps
    ]


def test_a_version_knows_the_step_that_made_it() -> None:
    """Version 0 is of no step; from a drift on numbers of versions run ahead of the steps'."""
    view = Views()
    view.apply(trainer_started())
    view.apply(step_completed(1))
    view.apply(trainer_started(epoch=2, next_step=2, policy_version=1))
    view.apply(redo_drifted(step=1, policy_version=2))
    view.apply(step_completed(2, epoch=2, policy_version=3))
    assert {0: 0, 1: 1, 2: 1, 3: 2} == view.state.run.made_by
    assert [2, 9] == [view.state.run.step_of(3), view.state.run.step_of(9)], "9 is not known yet"


def test_a_snapshot_does_not_change() -> None:
    view = Views()
    view.apply(step_completed(1))
    before = view.state.run
    view.apply(step_completed(2))
    assert (before.step, view.state.run.step) == (1, 2)


def test_the_same_problem_then_and_now() -> None:
    """The oldest and the newest evaluation of a row, whatever order they come in."""
    view = AnswersView()
    view.apply(answer(5, row=1, reward=1.0))
    view.apply(answer(0, row=1, reward=0.0))
    view.apply(answer(3, row=1, reward=0.0))
    view.apply(answer(9, row=8))
    (problem,) = view.state.problems
    assert problem.row == 1
    assert (problem.then.policy_version, problem.then.is_right) == (0, False)
    assert (problem.now.policy_version, problem.now.is_right) == (5, True)


def test_tokens_are_kept_in_runs_of_one_version() -> None:
    """A trajectory that spans two versions shows where the second began."""
    view = AnswersView()
    segments = (
        prompt_segment(2),
        policy_segment(2, version=0, finish_reason="policy_changed"),
        policy_segment(1, version=1),
    )
    view.apply(answer(0, segments=segments))
    then = view.state.problems[0].then
    assert then.prompt_ids == (0, 1)
    assert then.runs == (
        TokenRun(token_ids=(100, 101), policy_version=0),
        TokenRun(token_ids=(100,), policy_version=1),
    )


@pytest.mark.parametrize(
    "ids",
    [
        Tensor(dtype="int32", shape=(3,), codec="raw", data=bytes(4)),
        Tensor(dtype="int32", shape=(1, 1), codec="raw", data=bytes(4)),
        Tensor(dtype="int32", shape=(), codec="raw", data=bytes(4)),
        Tensor(dtype="float32", shape=(1,), codec="raw", data=b"\0\0\x80\x7f"),
        Tensor(dtype="int32", shape=(1,), codec="raw", data=b"\xff" * 4),
    ],
    ids=["too few bytes", "two axes", "no axis", "infinite", "below 0"],
)
def test_an_answer_whose_tokens_are_none_ends_no_view(ids: Tensor) -> None:
    """No role checks evaluations; what cannot be shown is passed by, and counts for the rest."""
    log = made_log()
    bus = MemoryBus(log, "run")
    bad = answer(0, segments=(prompt_segment(), replace(policy_segment(), token_ids=ids)))
    events = [bad, answer(1)]
    bus.producer("stranger").commit([outgoing(TRAJECTORIES, event) for event in events])
    views = Views()
    assert 2 == Feed(bus, views, (TRAJECTORIES,)).poll(0.0)
    (problem,) = views.state.samples.problems
    assert (1, 1) == (problem.then.policy_version, problem.now.policy_version)


def test_finished_pulls_are_summed() -> None:
    view = Views()
    view.apply(pull_requested(2))
    pulls = [policy_loaded(2, seconds=0.25, num_bytes=100, paused_s=0.125)] * NEWEST_PULLS
    for pull in (policy_loaded(1), *pulls):
        view.apply(pull)
    assert (NEWEST_PULLS + 1, tuple(pulls)) == (view.state.pulls.num_pulls, view.state.pulls.newest)
    first = policy_loaded(1)
    assert first.num_bytes + 100 * NEWEST_PULLS == view.state.pulls.num_bytes
    assert first.seconds + 0.25 * NEWEST_PULLS == view.state.pulls.seconds


def test_what_waits_between_two_roles_is_a_difference() -> None:
    """Five issued, one dead, three rolled out, one of them to evaluate, one scored."""
    view = Views()
    for sample in range(4):
        view.apply(prompt(sample=sample))
    view.apply(prompt(group_id="e0-0", sample=0, purpose="evaluate"))
    view.apply(dead_letter(sample=3))
    view.apply(answer(0))
    for sample in range(2):
        view.apply(trajectory(sample=sample))
    view.apply(worker_report(worker="logprob-0", role="logprob", counters={"samples": 1.0}))
    assert view.flow.waiting == {"prompts": 1, "trajectories": 1, "scored-trajectories": 1}
    view.apply(step_completed(1, samples=(sample_ref(),), absent=()))
    view.apply(step_completed(1, samples=(sample_ref(),), absent=()))
    assert view.flow.waiting["scored-trajectories"] == 0
    assert view.flow.closed == 2, "both that were sampled of the group"


def test_a_dead_sample_does_not_hide_one_that_waits() -> None:
    """It was never scored, so its group's end takes nothing off what the trainer has to do."""
    view = Views()
    for group_id in ("7", "8"):
        for sample in range(4):
            view.apply(prompt(group_id=group_id, sample=sample, group_size=4))
    for group_id in ("7", "8"):
        view.apply(dead_letter(group_id=group_id, sample=3))
        for sample in range(3):
            view.apply(trajectory(group_id=group_id, sample=sample, group_size=4))
    view.apply(prompt(group_id="10"))
    view.apply(trajectory(group_id="10"))
    view.apply(worker_report(worker="logprob-0", role="logprob", counters={"samples": 7.0}))
    closed = ClosedGroups(watermark=0, above=(7,))
    view.apply(groups_dropped(groups=(dropped_group(group_id="7"),), closed=closed))
    assert view.flow.waiting["scored-trajectories"] == 4
    trained = tuple(sample_ref(group_id="8", sample=sample) for sample in range(3))
    view.apply(
        step_completed(
            1, samples=trained, absent=(AbsentSample(group_id="8", sample=3, reason="reward"),)
        )
    )
    assert view.flow.waiting["scored-trajectories"] == 1


def test_a_copy_counts_nowhere() -> None:
    """Two samples, one of them written twice by a replay: every screen says two."""
    views = Views()
    for sample in (0, 1, 1):
        views.apply(prompt(sample=sample))
        views.apply(trajectory(sample=sample))
    assert (2, 2) == (views.flow.issued, views.flow.rolled_out)
    assert {"prompts": 0, "trajectories": 2, "scored-trajectories": 0} == views.flow.waiting
    assert [True, True] == [sample.is_rolled_out for sample in views.samples.open]


def test_what_retention_left_is_counted_from() -> None:
    """Reports and trajectories of trained groups are gone: what was trained was scored."""
    view = Views()
    for group_id in ("7", "8"):
        for sample in range(2):
            view.apply(prompt(group_id=group_id, sample=sample, group_size=2))
    trained = tuple(sample_ref(sample=sample) for sample in range(2))
    view.apply(step_completed(1, samples=trained, absent=()))
    view.apply(trajectory(group_id="8", sample=0, group_size=2))
    assert {"prompts": 1, "trajectories": 1, "scored-trajectories": 0} == view.flow.waiting
