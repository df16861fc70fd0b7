"""Recorded windows of the log-prob role, scored again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.replay import scores_again as module
from rlstreams.debug.replay.record import RecordingOptions, record
from rlstreams.debug.replay.scores_again import ScoreReplay, scores_again
from rlstreams.schemas.events import ScoredTrajectory, Tensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import SCORED, TRAJECTORIES
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.file import FileWeightChannel
from tests import factories
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import Stand, tick_until

NUM = 6


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """A run whose log-prob role scored six samples of two versions, two in a window and more."""
    stand = Stand(tmp_path / "run", logprob__window_s=0.001, logprob__token_budget=8)
    stand.publish(1)
    stand.publish(2)
    role = make_worker(stand.context("logprob"), stand.bus(), FakeScorer(), FileWeightChannel())
    for number in range(NUM):
        ids = factories.int32s(3)
        segment = factories.policy_segment(3, 1 + number % 2, token_ids=ids)
        segments = (factories.prompt_segment(), segment)
        sample = factories.trajectory(sample=number, group_size=16, segments=segments)
        stand.send(outgoing(TRAJECTORIES, sample))
    tick_until(role, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) == NUM)
    role.close()
    return stand


def again(stand: Stand, folder: Path) -> ScoreReplay:
    record(stand.bus(), stand.config, RecordingOptions(folder=folder))
    with Recording(folder) as recording:
        return scores_again(recording, stand.config, [])


@pytest.fixture(autouse=True)
def fake_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(_: RunConfig) -> tuple[FakeScorer, None]:
        return FakeScorer(), None

    monkeypatch.setattr(module, "make_scorers", made)


def test_every_window_comes_out_alike(stand: Stand, tmp_path: Path) -> None:
    """With the weights of the run's folder."""
    made = again(stand, tmp_path / "recording")
    assert (NUM, True, {}) == (made.scores.num_equal, made.is_equal, made.skipped)
    assert (2, []) == (made.num_known, made.missing)


def test_what_differs_is_named(stand: Stand, tmp_path: Path) -> None:
    """A score that another worker's computation left, in a window of its own."""
    one = stand.read(SCORED.name, ScoredTrajectory)[0]
    (score,) = one.scores
    wrong = replace(score, proximal_logprobs=Tensor.of(score.proximal_logprobs.numpy() - 0.5))
    sample = replace(one.trajectory, sample=15)
    stranger = {"instance": "other", "window": 1, "window_place": 0, "window_size": 1}
    stand.send(outgoing(SCORED, replace(one, trajectory=sample, scores=(wrong,), **stranger)))
    made = again(stand, tmp_path / "recording")
    assert (NUM, 1, False) == (made.scores.num_equal, made.scores.num_different, made.is_equal)
    assert made.scores.first.about.endswith("/15")


def test_windows_without_weights_or_a_part_are_passed_by(stand: Stand, tmp_path: Path) -> None:
    """Each with its reason; where no version is left, the way to them is named."""
    first, second = sorted((tmp_path / "run/weights").glob("v*"))
    second.unlink()
    one = stand.read(SCORED.name, ScoredTrajectory)[0]
    torn = {"instance": "other", "window": 1, "window_place": 0, "window_size": 2}
    stand.send(
        outgoing(SCORED, replace(one, trajectory=replace(one.trajectory, sample=15), **torn))
    )
    made = again(stand, tmp_path / "recording")
    assert [2] == made.missing
    assert 1 == made.skipped["in windows of which a part is not recorded"]
    rest = made.skipped["in windows of versions whose weights are not at hand"]
    assert (NUM, True) == (made.scores.num_equal + rest, rest > 0)
    first.unlink()
    with pytest.raises(NotRecordedError, match=r"of versions 1, 2 .* record with --weights"):
        again(stand, tmp_path / "again")


def test_a_role_that_scored_nothing_is_named(stand: Stand, tmp_path: Path) -> None:
    logprob = replace(stand.config.logprob, place="off")
    stand.config = replace(stand.config, logprob=logprob)
    with pytest.raises(NotRecordedError, match=r"logprob\.place is 'off'"):
        again(stand, tmp_path / "recording")


@pytest.mark.parametrize("refusal", ["", "no memory"])
def test_a_refusal_is_told_and_the_scorer_is_closed(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """Scored or not: one of several ranks has other processes."""
    num_closed = 0

    class RankScorer(FakeScorer):
        def score(
            self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
        ) -> Sequence[Scores]:
            if refusal:
                raise EngineError(refusal)
            return super().score(sequences, policy_version, temperature)

        def close(self) -> None:
            nonlocal num_closed
            num_closed += 1

    monkeypatch.setattr(module, "make_scorers", lambda _: (RankScorer(), None))
    made = again(stand, tmp_path / "recording")
    assert ({refusal: NUM} if refusal else {}, 1) == (made.failed, num_closed)
    assert (f"{NUM} not scored: no memory" in made.lines()) == bool(refusal)
    assert made.is_equal != bool(refusal)
