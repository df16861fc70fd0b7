"""A sample of several turns behind the rollout worker: who reads it, and what counts in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rlstreams.debug.inspect.words import Spelling
from rlstreams.schemas.events import PolicyPublished, ScoredTrajectory, Segment, Trajectory
from rlstreams.show.export.sample_table import turns_of
from rlstreams.streams.lineage.tokens import token_table
from rlstreams.workers.logprob.scoring import score_window
from rlstreams.workers.logprob.versions import plan_anchors, versions_of
from rlstreams.workers.loop.validation import check_trajectory
from rlstreams.workers.policy.puller import Load
from rlstreams.workers.trainer.intake.groups import is_truncated
from rlstreams.workers.trainer.intake.validation import check_versions, validate
from rlstreams.workers.trainer.learn.packing import pack
from rlstreams.workers.trainer.training.batch_metrics import _turns
from rlstreams.workers.weights.file import FileWeightChannel
from tests import factories as f
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import Stand

VOCAB_SIZE = 16
LOADS = {version: Load(weight_hash=f.HASH, load_id=f"l{version}") for version in (1, 2)}


def environment(num_tokens: int, **changes: object) -> Segment:
    return Segment(**{"author": "environment", "token_ids": f.int32s(num_tokens, 4), **changes})  # type: ignore[arg-type]


def _policy(num_tokens: int, version: int) -> Segment:
    return f.policy_segment(num_tokens, version, token_ids=f.int32s(num_tokens, 7))


def two_turns() -> Trajectory:
    """5 tokens of the prompt, 3 under version 1, 4 of the environment, 2 under version 2."""
    segments = (
        f.prompt_segment(5),
        _policy(3, 1),
        environment(4),
        _policy(2, 2),
    )
    return f.trajectory(
        group_id="0", sample=0, group_size=1, segments=segments, routed_experts=None
    )


def scored(folder: Path) -> ScoredTrajectory:
    """The same, scored under the versions that sampled it."""
    stand, scorer = Stand(folder), FakeScorer()
    published: list[PolicyPublished] = [stand.publish(version) for version in (1, 2)]
    for one in published:
        scorer.pull(one, FileWeightChannel())
    window = [two_turns()]
    anchors = plan_anchors(versions_of(window[0]), held=scorer.versions)
    (scores,) = score_window(window, anchors, LOADS, scorer)
    return f.scored(window[0], scores=scores)


def test_only_the_policys_segments_are_scored_given_all_before_them(tmp_path: Path) -> None:
    """The second turn's scores are conditioned on the environment's tokens."""
    event = scored(tmp_path)
    assert [(1, 1), (3, 2)] == [(s.segment, s.policy_version) for s in event.scores]
    assert [3, 2] == [len(s.proximal_logprobs) for s in event.scores]
    validate(event, VOCAB_SIZE, 100)
    check_versions(event, {1: f.HASH, 2: f.HASH})
    assert not is_truncated(event.trajectory)


def test_the_loss_holds_the_policys_tokens_alone(tmp_path: Path) -> None:
    """Others are read and not learnt from; staleness and anchors count only what was sampled."""
    event = scored(tmp_path)
    batch = pack([event], np.ones(1, np.float32), (), policy_version=2, token_budget=64)
    (micro,) = batch.micro_batches
    wanted = [0] * 5 + [1] * 3 + [0] * 4 + [1] * 2
    assert wanted == micro.loss_mask_BT[0].astype(int).tolist()
    assert [1] * 14 == micro.real_BT[0].astype(int).tolist()
    assert {"0": 2, "1": 3} == batch.staleness
    assert {"sampled": 5} == batch.anchors
    assert 5 == batch.num_loss_tokens
    turns = _turns([event.trajectory])
    assert {"turns": 2.0, "turns_max": 2.0, "environment_tokens": 4.0} == turns
    assert {} == _turns([f.trajectory()])


@pytest.mark.parametrize(
    "wrong",
    [{"policy_version": 1}, {"behavior_logprobs": f.float32s(4)}],
)
def test_tokens_that_no_policy_sampled_may_not_claim_one(wrong: dict[str, object]) -> None:
    """A version or log-probs there would be a mistake of whoever wrote the event."""
    event = two_turns()
    check_trajectory(event, VOCAB_SIZE, 100)
    segments = (*event.segments[:2], environment(4, **wrong), event.segments[3])
    with pytest.raises(ValueError, match=r"segments\[2\] is by environment, and has"):
        check_trajectory(dataclasses.replace(event, segments=segments), VOCAB_SIZE, 100)


def test_people_are_told_who_wrote_what() -> None:
    """The table of tokens, the lineage, and the turns of an exported row."""
    event = two_turns()
    table = token_table(event)
    assert 5 == int(table.is_policy_N.sum())
    assert [-1] * 5 + [1] * 3 + [-1] * 4 + [2] * 2 == table.version_N.tolist()
    spelling = Spelling(decode=lambda ids: str(len(ids)), plain=lambda ids: str(len(ids)), hash="x")
    assert [
        {"author": "policy", "text": "3"},
        {"author": "environment", "text": "4"},
        {"author": "policy", "text": "2"},
    ] == turns_of(event, spelling)
