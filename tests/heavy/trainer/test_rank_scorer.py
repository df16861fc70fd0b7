"""A scorer of two ranks on the CPU: the bits of one, and a rank that dies ends it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.compute.score import MeshScorer, scorer_of
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import LayoutSection
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.logprob.scoring import score_in_halves
from rlstreams.workers.model.base import RankLostError
from rlstreams.workers.weights.channel import WeightError
from tests import families
from tests.heavy.trainer.parallel_stand import make_model

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)


class Moved(FolderChannel):
    """The folder's weights, moved a little for each version."""

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().pull(published, deadline_s):
            yield name, tensor * (1 + 0.1 * published.policy_version)

    def at(self, version: int) -> PolicyPublished:
        return replace(self.published, policy_version=version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def two_of(folder: Path) -> MeshScorer:
    team = Team([""], owner="scorer")
    return scorer_of(folder, team=team, token_budget=24)


def sequences(num: int = 7) -> list[TokenSequence]:
    """An odd number of forwards: then one rank is idle in the last round."""
    draw = np.random.default_rng(0)
    return [
        TokenSequence(token_ids=draw.integers(0, 48, 5 + n).astype(np.int32)) for n in range(num)
    ]


def test_two_ranks_give_the_bits_of_one(folder: Path) -> None:
    """Under versions in turn, one pulled between two scores; what does not fit is refused, and a
    killed rank is named, and blames no record."""
    channel = Moved(folder)
    one = scorer_of(folder, token_budget=24)
    with closing(two_of(folder)) as two:
        for version in (0, 1):
            for scorer in (one, two):
                scorer.pull(channel.at(version), channel)
            for asked in {0, version}:
                alone = one.score(sequences(), asked, 0.7)
                together = two.score(sequences(), asked, 0.7)
                for expected, found in zip(alone, together, strict=True):
                    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
                    np.testing.assert_array_equal(found.entropy, expected.entropy)
            two.off_load()  # between any two windows; what comes back is all that it was
            assert {0} == {r.untyped_storage().nbytes() for r in two._held[version].rows.values()}
            two.load_back()
        two.drop(0)
        assert [1] == list(two.versions)
        with pytest.raises(WeightError, match=r"weights do not fit the model: .* is missing"):
            two.pull(replace(channel.at(2), layout="[]"), channel)
        assert two.mesh.team is not None
        (process,) = two.mesh.team.processes
        os.kill(process, signal.SIGKILL)
        told = rf"rank 1 of the scorer \(process {process}\) was ended by SIGKILL"
        with pytest.raises(RankLostError, match=told):
            score_in_halves(sequences(1), lambda part: two.score(part, 1, 1.0))


def test_a_reference_lies_on_the_same_ranks(folder: Path) -> None:
    """Beside the policy, in the same processes; with its likeliest tokens, to the bit."""
    channel = FolderChannel(folder)
    options: dict[str, Any] = {"token_budget": 24}
    team = Team([""], owner="scorer")
    found = []
    for ranks in (None, team):
        reference = scorer_of(folder, team=ranks, top_k=4, **options)
        policy = scorer_of(folder, team=ranks, **options)
        for scorer in (reference, policy):
            scorer.pull(channel.published, channel)
        found.append([s.score(sequences(), 0, 1.0) for s in (reference, policy, reference)])
    team.close()
    policy.close()
    for alone, together in zip(*found, strict=True):
        for expected, one in zip(alone, together, strict=True):
            for name in ("logprobs", "entropy", "top_logprobs", "top_ids"):
                np.testing.assert_array_equal(getattr(one, name), getattr(expected, name))
    assert found[0][0][0].top_ids.shape == (5, 4)
    assert found[0][1][0].top_ids is None


@needs_megatron
@pytest.mark.parametrize(
    "layout",
    [LayoutSection(tp=2), pytest.param(LayoutSection(pp=2), marks=pytest.mark.slow)],
)
def test_layers_that_ranks_share_score_as_those_of_one(
    layout: LayoutSection, tmp_path: Path
) -> None:
    """With the likeliest tokens, of a vocabulary that is shared out too."""
    folder = families.make("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=False)
    channel, found = FolderChannel(folder), []
    team = Team([""], owner="scorer")
    options: dict[str, Any] = {"team": team, "backend": "megatron", "layout": layout}
    for asked in ({}, options):
        scorer = scorer_of(folder, token_budget=24, top_k=4, **asked)
        scorer.pull(channel.published, channel)
        for _ in range(2):
            found.append(scorer.score(sequences(), 0, 0.7))
            scorer.off_load()
            scorer.load_back()
    scorer.close()
    for one, _, many, again in zip(*found, strict=True):
        for name in ("logprobs", "entropy", "top_logprobs"):
            expected = getattr(one, name)
            np.testing.assert_allclose(getattr(many, name), expected, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(getattr(again, name), getattr(many, name))
        np.testing.assert_array_equal(many.top_ids, one.top_ids)
