"""A scorer of two ranks on the CPU: the bits of one, and a rank that dies ends it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.compute.rank_scorer import RanksScorer
from rlstreams.workers.compute.score import BuiltinScorer
from rlstreams.workers.compute.team import Team
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.logprob.scoring import score_in_halves
from rlstreams.workers.model.base import RankLostError
from rlstreams.workers.weights.channel import WeightError
from tests.heavy.trainer.parallel_stand import make_model


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


def scorer_of(folder: Path, **options: object) -> RanksScorer:
    team = Team([""], owner="scorer")
    return RanksScorer(team, folder, token_budget=24, **options)  # type: ignore[arg-type]


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
    one = BuiltinScorer(folder, token_budget=24)
    with closing(scorer_of(folder)) as two:
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
            assert {0} == {r.untyped_storage().nbytes() for r in two._own._held[version].values()}
            two.load_back()
        two.drop(0)
        assert [1] == list(two.versions)
        with pytest.raises(WeightError, match=r"weights do not fit the model: .* is missing"):
            two.pull(replace(channel.at(2), layout="[]"), channel)
        (process,) = two._team.processes
        os.kill(process, signal.SIGKILL)
        told = rf"rank 1 of the scorer \(process {process}\) was ended by SIGKILL"
        with pytest.raises(RankLostError, match=told):
            score_in_halves(sequences(1), lambda part: two.score(part, 1, 1.0))
