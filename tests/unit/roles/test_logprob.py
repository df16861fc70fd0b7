"""The log-prob role on the in-memory log with the fake scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.schemas.events import DeadLetter, ScoredTrajectory, Segment, Tensor, Trajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.done_set import covered
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, TRAJECTORIES
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.logprob import windows as module
from rlstreams.workers.logprob.scoring import Reference
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.weights.file import FileWeightChannel
from tests import factories
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import Stand, tick_until


def make_logprob(stand: Stand, scorer: FakeScorer | None = None) -> StageLoop:
    context = stand.context("logprob")
    return make_worker(context, context.bus, scorer or FakeScorer(), FileWeightChannel())


def ids(*values: int) -> Tensor:
    return Tensor.of(np.array(values, np.int32))


def segment(version: int, *values: int, logprob: float = -1.0) -> Segment:
    return Segment(
        author="policy",
        token_ids=ids(*values),
        policy_version=version,
        behavior_logprobs=Tensor.of(np.full(len(values), logprob, np.float32)),
        finish_reason="stop",
    )


def trajectory(group: str, *segments: Segment, **changes: object) -> Trajectory:
    prompt = Segment(author="prompt", token_ids=ids(3, 4))
    values = {"group_id": group, "sample": 0, "segments": (prompt, *segments)}
    return factories.trajectory(**(values | changes))


def send(stand: Stand, *events: Trajectory) -> None:
    stand.send(*(outgoing(TRAJECTORIES, event) for event in events))


def scored(stand: Stand) -> dict[str, ScoredTrajectory]:
    return {s.trajectory.group_id: s for s in stand.read(SCORED.name, ScoredTrajectory)}


def score_all(
    stand: Stand, *events: Trajectory, logprob: StageLoop | None = None
) -> dict[str, ScoredTrajectory]:
    """Send them to a worker, and let it end once all are scored."""
    logprob = logprob or make_logprob(stand)
    num = len(scored(stand)) + len(events)
    send(stand, *events)
    tick_until(logprob, lambda: len(scored(stand)) == num)
    logprob.close()
    return scored(stand)


def test_each_segment_is_scored_under_the_version_that_sampled_it(tmp_path: Path) -> None:
    """Old versions that are still served are pulled; a spanning sample is scored under both."""
    stand = Stand(tmp_path)
    published = {version: stand.publish(version) for version in range(4)}
    found = score_all(
        stand,
        trajectory("0", segment(3, 5, 6)),
        trajectory("1", segment(1, 5, 6), segment(2, 7, 8)),
        trajectory("2", segment(0, 5, 6)),
    )
    assert [(s.anchor, s.policy_version) for s in found["1"].scores] == [
        ("sampled", 1),
        ("sampled", 2),
    ]
    assert [s.policy_version for s in found["0"].scores + found["2"].scores] == [3, 0]
    reference = FakeScorer()
    reference.pull(published[2], FileWeightChannel())
    sequence = TokenSequence(token_ids=np.array([3, 4, 5, 6, 7, 8], np.int32))
    (expected,) = reference.score([sequence], 2, 1.0)
    second = found["1"].scores[1]
    assert second.proximal_logprobs.numpy().tolist() == expected.logprobs[4:].tolist()
    assert second.entropy.numpy().tolist() == expected.entropy[4:].tolist()
    assert second.weight_hash == published[2].weight_hash


def with_reference(stand: Stand) -> StageLoop:
    """A worker that also holds version 0 for good, as one whose run has a KL term does."""
    context, scorer = stand.context("logprob"), FakeScorer()
    published = stand.publish(0, announce=False)
    scorer.pull(published, FileWeightChannel())
    reference = Reference(scorer=scorer, policy_version=0, weight_hash=published.weight_hash)
    return make_worker(context, context.bus, FakeScorer(), FileWeightChannel(), reference)


def test_every_policy_segment_is_scored_under_the_reference_too(tmp_path: Path) -> None:
    """Whatever sampled it, also where no version is left to score it; equal to that one's own."""
    stand = Stand(tmp_path)
    for version in range(6):
        stand.publish(version)
    stand.server.retire(2)
    stand.publish(5)
    spanning = trajectory("0", segment(4, 5, 6), segment(5, 7))
    told = score_all(
        stand, spanning, trajectory("1", segment(0, 5, 6)), logprob=with_reference(stand)
    )
    whole = FakeScorer()
    published = stand.publish(0, announce=False)
    whole.pull(published, FileWeightChannel())
    sequence = TokenSequence(token_ids=np.array([3, 4, 5, 6, 7], np.int32))
    (expected,) = whole.score([sequence], 0, 1.0)
    found = [s.reference_logprobs for s in told["0"].scores]
    assert [t.numpy().tolist() for t in found if t is not None] == [
        expected.logprobs[2:4].tolist(),
        expected.logprobs[4:].tolist(),
    ]
    (gone,) = told["1"].scores
    assert gone.anchor == "behavior"
    assert gone.reference_logprobs.numpy().tolist() == expected.logprobs[2:4].tolist()
    assert {s.reference_hash for s in (*told["0"].scores, gone)} == {published.weight_hash}


def test_a_version_that_is_gone_is_scored_by_a_near_one_and_labelled(tmp_path: Path) -> None:
    """At most two versions away; else the behavior log-probs stand in. Never a drop."""
    stand = Stand(tmp_path)
    for version in range(6):
        stand.publish(version)
    stand.server.retire(2)
    stand.publish(5)
    found = score_all(stand, trajectory("0", segment(3, 5, 6)), trajectory("1", segment(0, 5, 6)))
    (near,), (gone,) = found["0"].scores, found["1"].scores
    assert (near.anchor, near.policy_version) == ("nearby", 4)
    assert (gone.anchor, gone.policy_version) == ("behavior", -1)
    assert gone.proximal_logprobs.numpy().tolist() == [-1.0, -1.0]


def test_evaluations_pass_by(tmp_path: Path) -> None:
    """They are done with, and never reach the trainer."""
    stand = Stand(tmp_path)
    stand.publish(0)
    logprob = make_logprob(stand)
    send(
        stand,
        trajectory("e0-1", segment(0, 5), purpose="evaluate"),
        trajectory("0", segment(0, 5)),
    )
    tick_until(logprob, lambda: len(scored(stand)) == 1)
    logprob.close()
    assert list(scored(stand)) == ["0"]
    committed = stand.bus().committed("logprob", TRAJECTORIES.name)
    for number in range(2):
        end = stand.bus().ends(TRAJECTORIES.name)[Partition(TRAJECTORIES.name, number)]
        reached = committed.get(Partition(TRAJECTORIES.name, number))
        assert all(covered(reached, offset) for offset in range(end - 1 if end else 0))


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (trajectory("9", segment(0, 5, 99)), "token_ids[1] must be below 16, got 99"),
        (
            trajectory("9", segment(0, 5, logprob=float("nan"))),
            "behavior_logprobs[0] must be finite and at most 0, got nan",
        ),
    ],
)
def test_a_trajectory_that_cannot_be_is_buried(
    tmp_path: Path, event: Trajectory, told: str
) -> None:
    """The letter names field, place and value; the next trajectory is scored."""
    stand = Stand(tmp_path)
    stand.publish(0)
    logprob = make_logprob(stand)
    send(stand, event, trajectory("0", segment(0, 5)))
    tick_until(
        logprob, lambda: bool(scored(stand)) and bool(stand.read("dead-letters", DeadLetter))
    )
    logprob.close()
    (letter,) = stand.read(DEAD_LETTERS.name, DeadLetter)
    assert (letter.group_id, letter.reason) == ("9", "validation")
    assert told in letter.detail


def test_a_version_that_nobody_announces_is_buried_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign version number holds up nobody; its record waits alone."""
    monkeypatch.setattr(module, "ANNOUNCEMENT_DEADLINE_S", 3600.0)
    stand = Stand(tmp_path)
    stand.publish(0)
    logprob = make_logprob(stand)
    send(stand, trajectory("9", segment(7, 5)), trajectory("0", segment(0, 5)))
    tick_until(logprob, lambda: len(scored(stand)) == 1)
    assert not stand.read(DEAD_LETTERS.name, DeadLetter)
    monkeypatch.setattr(module, "ANNOUNCEMENT_DEADLINE_S", 0.0)
    tick_until(logprob, lambda: bool(stand.read(DEAD_LETTERS.name, DeadLetter)))
    logprob.close()
    (letter,) = stand.read(DEAD_LETTERS.name, DeadLetter)
    assert "policy version 7 was not announced" in letter.detail


class RouteKeeper(FakeScorer):
    """Remembers the routes that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        self.told += [(s.routed_experts, s.routed_experts_mask) for s in sequences]
        return super().score(sequences, policy_version, temperature)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_scorer_is_told_the_recorded_routes_where_they_are_replayed(
    is_on: bool, tmp_path: Path
) -> None:
    """And the score says so, of samples that had none too."""
    stand = Stand(tmp_path)
    stand.publish(0)
    context = stand.context("logprob")
    section = replace(context.config.trainer, routing_replay=is_on)
    context = replace(context, config=replace(context.config, trainer=section))
    scorer = RouteKeeper()
    logprob = make_worker(context, context.bus, scorer, FileWeightChannel())
    rows = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    routed = replace(trajectory("0", segment(0, 5, 6)), routed_experts=Tensor.of(rows))
    found = score_all(stand, routed, trajectory("1", segment(0, 5, 6)), logprob=logprob)
    assert {s.routing_replayed for s in found.values()} == {is_on}
    told = [experts.tolist() for experts, _ in scorer.told if experts is not None]
    assert told == ([rows.tolist()] if is_on else [])
    assert len(scorer.told) == 2
