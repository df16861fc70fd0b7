"""Two ranks that share each row: what one rank computes, done again to the bit, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.deal import for_hands
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LayoutSection, OptimizerSection, TrainerSection
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model import bins, context
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.cut import Cut
from rlstreams.workers.model.model import load_model
from rlstreams.workers.trainer.learn.batch_factors import Look
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.heavy.test_packed_scorer import sequences_of
from tests.heavy.trainer import flawed_follower, packing_follower
from tests.heavy.trainer.parallel_stand import batch_of, hashes, leave, meet_again

# Without a mean over steps the first moment is the gradient.
SECTION = TrainerSection(
    optimizer=OptimizerSection(lr=1e-2, warmup_steps=0, max_grad_norm=1e9, beta1=0.0),
    loss=LossSection(
        kind="gspo", proximal="step_start", correction_level="sequence", reduce="sequence"
    ),
    activation_checkpointing=True,
    micro_batch_tokens=64,
)
SLICED = replace(SECTION, ranks=2, layout=LayoutSection(cp=2))
TOLERANCE = 1e-5
PACKING = packing_follower.__name__
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
at_night = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _rank_0() -> Iterator[None]:
    """Takes documents, as all other ranks here."""
    with pytest.MonkeyPatch.context() as patch:
        packing_follower.pack(patch.setattr)
        yield


@pytest.fixture(scope="module")
def two() -> Iterator[Team]:
    """A second rank for all tests."""
    with closing(Team([""], program=PACKING)) as team:
        yield team


def padded(batch: Batch) -> Batch:
    """The same micro-batches without bins."""
    rows = tuple(replace(row, bin_tokens=0) for row in batch.micro_batches)
    cut = Cut(order=batch.cut.order, sizes=batch.cut.sizes)
    return replace(batch, micro_batches=rows, cut=cut)


def looks_of(training: Training, batch: Batch) -> list[Look]:
    """Of all ranks, each of which looks at its own slices."""
    learner = training.learner
    assert learner.mesh.team is not None
    _, *others = for_hands(batch, learner._shards.hands)
    own = partial(learner._looks, batch)
    found: list[Look] = learner.mesh.team.together(
        own, "_looks", by_rank=[(one,) for one in others], number=learner.number
    )[0]
    return found


@pytest.mark.parametrize(
    ("family", "changes", "in_bins", "ranks"),
    [
        at_night("Qwen3ForCausalLM", {"num_attention_heads": 8}, False, 2),
        ("Qwen3ForCausalLM", {"num_attention_heads": 8}, True, 2),
        at_night("Qwen3ForCausalLM", {"num_key_value_heads": 1}, False, 4),
        at_night("Gemma3ForCausalLM", {"num_key_value_heads": 1}, True, 2),
        at_night("Qwen3MoeForCausalLM", {}, False, 2),
        ("Qwen3MoeForCausalLM", {}, True, 2),
    ],
)
def test_slices_of_rows_give_what_whole_rows_give(
    family: str, changes: dict[str, int], in_bins: bool, ranks: int, tmp_path: Path, two: Team
) -> None:
    """Log-probs, entropies, loss and gradients in float32, of a loss of whole sequences; mixtures
    along recorded routes. Done again, also after meeting anew, equal to the bit."""
    folder = families.make(family, tmp_path, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bins, "CPU", CPU)
        one = Training(folder, SECTION, threads=1)
    team = two if ranks == 2 else Team([""] * (ranks - 1), program=PACKING)
    many = Training(folder, replace(SLICED, ranks=ranks), threads=1, team=team)
    assert not many.learner.why_padded
    assert bool(many.why_eager) == ("Moe" in family)
    assert many.learner.why_unshared == "ranks share each row"
    batch = batch_of(0, 57, in_bins=in_bins, is_routed="Moe" in family)
    assert any((m.bin_tokens or m.real_BT.shape[1]) % 2 for m in batch.micro_batches)
    start = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
    looks = zip(one.learner._looks(padded(batch)), looks_of(many, batch), strict=True)
    for whole, sliced in looks:
        assert np.abs(whole.logprobs_n - sliced.logprobs_n).max() < TOLERANCE
        assert np.abs(whole.entropy_n - sliced.entropy_n).max() < TOLERANCE
    alone, together = one.learner.step(padded(batch)), many.learner.step(batch)
    computed = {"tokens_computed": together.metrics["tokens_computed"]}
    assert alone.metrics | computed == pytest.approx(together.metrics, abs=TOLERANCE)
    assert alone.loss == pytest.approx(together.loss, abs=TOLERANCE)
    theirs = many.learner.optimizer_tensors()
    moments = {k: t for k, t in one.learner.optimizer_tensors().items() if k.endswith("exp_avg")}
    assert max(float(moment.abs().max()) for moment in moments.values()) > 1000 * TOLERANCE
    for name, moment in moments.items():
        assert float((theirs[name] - moment).abs().max()) < TOLERANCE, name
    first = hashes(many)
    assert first[0] != weight_hash(start)
    for _ in range(2):
        meet_again(many)
        many.learner.load(start, {}, 0)
        assert many.learner.step(batch) == together
        assert hashes(many) == first
    leave(many)
    if ranks > 2:
        team.close()


def test_one_rank_s_compiler_decides_for_all(tmp_path: Path) -> None:
    """Its layers differ, so all compile without fusion; there it fails, so all compute the layers
    as they are, say so, and learn the same."""
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    batch, losses = batch_of(0, 57, in_bins=True), []
    for program in (PACKING, flawed_follower.__name__):
        with closing(Team([""], program=program)) as team:
            training = Training(folder, SLICED, threads=1, team=team)
            losses.append(training.learner.step(batch).loss)
            assert training.numerics.compiled == (not training.why_eager)
            leave(training)
    assert "the compiler of this rank is flawed" in training.why_eager
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


def test_ranks_that_share_rows_score_as_one(tmp_path: Path, two: Team) -> None:
    """Compiled, forwards alone."""
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    channel, found = FolderChannel(folder), []
    sequences = sequences_of([40, 1, 17, 2, 58, 33, 5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bins, "CPU", CPU)  # this one pads rows
        one = scorer_of(folder, token_budget=64)
    together = scorer_of(folder, team=two, token_budget=64, layout=LayoutSection(cp=2))
    assert not together.why_padded
    assert not together.why_eager
    for scorer in (one, together):
        scorer.pull(channel.published, channel)
        for _ in range(2):
            found.append(scorer.score(sequences, channel.published.policy_version, 0.7))
    two.together(together.leave, "leave", number=together.number)
    for alone, _, sliced, again in zip(*found, strict=True):
        np.testing.assert_allclose(sliced.logprobs, alone.logprobs, atol=TOLERANCE)
        np.testing.assert_allclose(sliced.entropy, alone.entropy, atol=TOLERANCE)
        np.testing.assert_array_equal(again.logprobs, sliced.logprobs)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        at_night("Qwen3NextForCausalLM", {}, "Qwen3NextForCausalLM cannot be computed by slices"),
        ("NemotronForCausalLM", {}, "NemotronForCausalLM has log-probs .* nats .* off in slices"),
    ],
)
def test_a_model_that_cannot_be_sliced_is_refused(
    family: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    """By its name, before a step; what only a try tells."""
    folder = families.make(family, tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"^trainer\.layout\.cp is .*{words}"):
        Training(folder, SLICED, threads=1, team=Team([""], program=PACKING))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("GptOssForCausalLM", {}, "attention of a gpt_oss is eager: set cp to 1"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is 'dynamic'",
        ),
    ],
)
def test_what_a_model_says_of_itself_is_refused_without_ranks(
    family: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    """The same refusal, asked of the model alone: no rank has to start for it."""
    model = load_model(families.make(family, tmp_path, **changes))
    with pytest.raises(ConfigError, match=rf"^trainer\.layout\.cp is 2, but .*{words}"):
        context._check(model, 2, "trainer")
    context._check(load_model(families.make("Qwen3ForCausalLM", tmp_path / "fine")), 2, "trainer")
