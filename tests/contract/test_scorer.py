"""The promises of the port `Scorer`, held against every scorer that runs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rlstreams.workers.engines.base import Int32s, Scorer, Scores, TokenSequence
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import KINDS, PROMPT, Rig


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    return Rig(request.param, tmp_path)


def score_one(
    scorer: Scorer, ids: Int32s, policy_version: int = 0, temperature: float = 1.0
) -> Scores:
    (scores,) = scorer.score([TokenSequence(token_ids=ids)], policy_version, temperature)
    return scores


def test_each_token_is_given_those_before_it(rig: Rig) -> None:
    """Changing a token changes its own log-prob and later ones, never an earlier one."""
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    other = PROMPT.copy()
    other[3] = 5
    scores, changed = score_one(scorer, PROMPT), score_one(scorer, other)
    assert scores.logprobs[0] == scores.entropy[0] == 0
    np.testing.assert_allclose(changed.logprobs[:3], scores.logprobs[:3], atol=1e-5)
    np.testing.assert_allclose(changed.entropy[:4], scores.entropy[:4], atol=1e-5)
    assert abs(changed.logprobs[3] - scores.logprobs[3]) > 1e-3
    assert (scores.logprobs[1:] < 0).all()


def test_padding_changes_nothing(rig: Rig) -> None:
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    sequences = [TokenSequence(token_ids=np.resize(PROMPT, n)) for n in (1, 7, 3, 40)]
    together = scorer.score(sequences, 0, 1.0)
    for sequence, scores in zip(sequences, together, strict=True):
        alone = score_one(scorer, sequence.token_ids)
        assert scores.logprobs.shape == scores.entropy.shape == sequence.token_ids.shape
        assert scores.logprobs.dtype == scores.entropy.dtype == np.float32
        np.testing.assert_allclose(scores.logprobs, alone.logprobs, atol=1e-5)
        np.testing.assert_allclose(scores.entropy, alone.entropy, atol=1e-5)


def test_temperature_flattens(rig: Rig) -> None:
    """At a very high temperature each token is as likely as any: log of the vocabulary's size."""
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    scores = score_one(scorer, PROMPT, temperature=1e6)
    expected = np.log(scorer.vocab_size)
    np.testing.assert_allclose(scores.logprobs[1:], -expected, atol=1e-3)
    np.testing.assert_allclose(scores.entropy[1:], expected, atol=1e-3)


def test_versions_are_held_side_by_side(rig: Rig) -> None:
    """Each call is answered under the version that it names, whatever was pulled last."""
    scorer = rig.scorer()
    for version in (1, 0, 1):
        scorer.pull(rig.publish(version), rig.channel)
    assert list(scorer.versions) == [0, 1]
    under_0, under_1 = score_one(scorer, PROMPT, 0), score_one(scorer, PROMPT, 1)
    assert np.abs(under_0.logprobs - under_1.logprobs).max() > 1e-3
    scorer.drop(0)
    assert score_one(scorer, PROMPT, 1).logprobs.tolist() == under_1.logprobs.tolist()
    with pytest.raises(EngineError, match=r"version 0 is not held, only \[1\]"):
        score_one(scorer, PROMPT, 0)


def test_what_was_off_loaded_scores_to_the_same_bits(rig: Rig) -> None:
    """Versions stay held on the host, may be dropped there, and come back bit for bit."""
    scorer = rig.scorer()
    for version in (0, 1):
        scorer.pull(rig.publish(version), rig.channel)
    before = score_one(scorer, PROMPT, 1)
    scorer.off_load()
    scorer.drop(0)
    scorer.load_back()
    assert list(scorer.versions) == [1]
    assert score_one(scorer, PROMPT, 1).logprobs.tolist() == before.logprobs.tolist()


def test_versions_come_and_go_while_it_scores(rig: Rig) -> None:
    """Every bit as without them: what is held is never written to."""
    scorer = rig.scorer()
    published = [rig.publish(version) for version in range(3)]
    scorer.pull(published[0], rig.channel)
    expected = score_one(scorer, PROMPT, 0).logprobs.tolist()
    with ThreadPoolExecutor(1) as pulls:
        for version in (1, 2) * 2:
            pulls.submit(scorer.pull, published[version], rig.channel)
            pulls.submit(scorer.drop, 3 - version)
        end = pulls.submit(scorer.drop, 0)
        while 0 in scorer.versions:
            try:
                assert score_one(scorer, PROMPT, 0).logprobs.tolist() == expected
            except EngineError:  # dropped just now
                break
        end.result()


def test_a_failed_pull_leaves_what_is_held(rig: Rig) -> None:
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    before = score_one(scorer, PROMPT).logprobs.tolist()
    bad = rig.publish(1)
    (path,) = rig.folder.glob("v00000001-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightError):
        scorer.pull(bad, rig.channel)
    assert list(scorer.versions) == [0]
    assert score_one(scorer, PROMPT).logprobs.tolist() == before


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 9999], r"sequence 0: token_ids\[1\] = 9999"),
        ([-1, 2], r"sequence 0: token_ids\[0\] = -1"),
        ([], "sequence 0: token_ids is empty"),
        ([1] * 129, "sequence 0 has 129 tokens, the limit is 128"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(rig: Rig, ids: list[int], message: str) -> None:
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    with pytest.raises(EngineError, match=message):
        score_one(scorer, np.array(ids, np.int32))


def test_nothing_to_score_is_no_error(rig: Rig) -> None:
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    assert list(scorer.score([], 0, 1.0)) == []
