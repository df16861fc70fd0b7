"""Two ranks in bins that share prompts, with compiled layers, as on GPUs: the step and the scores
of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.trainer.learn.cutting import prefixes_of
from rlstreams.workers.trainer.training.training import Training
from tests import families
from tests.documents_on_cpu import take_documents_on_cpu
from tests.heavy.test_packed_scorer import related, sequences_of
from tests.heavy.trainer import packing_follower
from tests.heavy.trainer.parallel_stand import hashes
from tests.unit.trainer.trainer_builders import (
    VOCAB_SIZE,
    batch_of,
    prompt_segment,
    random_samples,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the library's own
PACKING = packing_follower.__name__
BIN = 256  # tokens: bins of 256 and of 128
NUM = 135  # samples: three bins, of which the last is nearly full
PROMPT = 9  # tokens
SECTION = TrainerSection(
    optimizer=OptimizerSection(lr=1e-2, warmup_steps=0, beta1=0.0),  # a moment is the gradient
    micro_batch_tokens=BIN,
    activation_checkpointing=True,
)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _rank_0() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        take_documents_on_cpu(patch.setattr)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make("Qwen3ForCausalLM", tmp_path_factory.mktemp("model"))


def groups() -> list[ScoredTrajectory]:
    """Samples of groups of four, each with its prompt."""
    found = []
    for sample in random_samples(NUM):
        seed = int(sample.trajectory.group_id)
        prompt = prompt_segment(np.random.default_rng(seed).integers(0, VOCAB_SIZE, PROMPT))
        segments = (prompt, *sample.trajectory.segments[1:])
        found.append(replace(sample, trajectory=replace(sample.trajectory, segments=segments)))
    return found


def test_a_step_of_compiled_ranks_is_that_of_one(folder: Path) -> None:
    """Of an odd number of bins, so that one rank is idle in the end; done again, the same bits."""
    one = Training(folder, SECTION, threads=1)
    team = Team([""], program=PACKING)
    with closing(Training(folder, replace(SECTION, ranks=2), threads=1, team=team)) as two:
        for training in (one, two):
            assert not training.learner.why_padded
            assert not training.why_eager
            assert training.numerics.compiled
        samples = groups()
        prefixes = prefixes_of(samples, replay_routes=False)
        batch = batch_of(samples, token_budget=BIN, in_bins=True, prefixes=prefixes)
        assert len(batch.micro_batches) % 2 == 1
        assert batch.figures()["tokens_shared"] > NUM * PROMPT / 2
        start = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
        alone, together = one.learner.step(batch), two.learner.step(batch)
        assert alone.loss == pytest.approx(together.loss, abs=TOLERANCE)
        own, theirs = (t.learner.optimizer_tensors() for t in (one, two))
        moments = {key: t for key, t in own.items() if key.endswith("exp_avg")}
        assert max(float(moment.abs().max()) for moment in moments.values()) > 100 * TOLERANCE
        for name, moment in moments.items():
            assert float((theirs[name] - moment).abs().max()) < TOLERANCE, name
        first = hashes(two)
        two.learner.load(start, {}, 0)
        assert two.learner.step(batch) == together
        assert hashes(two) == first
        dealt, _ = two._step(samples, two._advantages(samples), [], 2, None, ())
        assert len(dealt.micro_batches) == len(batch.micro_batches) + 1  # nobody is idle
        assert dealt.figures()["tokens_shared"] > NUM * PROMPT / 2


def test_compiled_ranks_score_as_one(folder: Path) -> None:
    """To the bit: which rank has a bin is of no account."""
    channel = FolderChannel(folder)
    sequences = related(sequences_of([40, 1, 64, 17, 2, 58, 33, 64, 5]))
    one = scorer_of(folder, token_budget=BIN)
    team = Team([""], owner="scorer", program=PACKING)
    with closing(scorer_of(folder, team=team, token_budget=BIN)) as two:
        found = []
        for scorer in (one, two):
            assert not scorer.why_padded
            assert not scorer.why_eager
            scorer.pull(channel.published, channel)
            found.append(scorer.score(sequences, channel.published.policy_version, 0.7))
    for alone, together in zip(*found, strict=True):
        np.testing.assert_array_equal(together.logprobs, alone.logprobs)
        np.testing.assert_array_equal(together.entropy, alone.entropy)
