"""Weights of 16 bits, layers computed twice, rows without a mask: the same steps as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.config.trainer import LoraSection, OptimizerSection, TrainerSection
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.layers import recompute_activations
from rlstreams.workers.model.model import load_model, right_padded
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.layout import layout_of, weight_hash
from tests import families
from tests.contract.engine_rigs import announced
from tests.unit.trainer.trainer_builders import batch_of, learned, random_samples

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

BF16 = "bfloat16"
FAST = OptimizerSection(lr=1e-2, warmup_steps=0)
QWEN3 = "Qwen3ForCausalLM"


def trained(folder: Path, *, dtype: str = BF16, **section: Any) -> Training:
    return Training(folder, TrainerSection(**section), threads=1, dtype=dtype)


@pytest.mark.parametrize("lora", [LoraSection(), LoraSection(rank=4)])
def test_sixteen_bits_learn_the_same_twice(lora: LoraSection, tmp_path: Path) -> None:
    """Also when a checkpoint lies between; what is published is bfloat16."""
    folder = families.make(QWEN3, tmp_path / "model")
    first = trained(folder, lora=lora, optimizer=FAST)
    before = first.model_hash
    expected = learned(trained(folder, lora=lora, optimizer=FAST), range(4))
    learned(first, range(2))
    middle = weight_hash(first.learner.weights())
    manifest = Manifest(run="r", epoch=1, step=2, policy_version=2, weight_hash=middle)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(manifest, first.learner.weights(), first.learner.optimizer_tensors())
    second = trained(folder, lora=lora, optimizer=FAST)
    second.restore(store, manifest)
    assert learned(second, range(2, 4)) == expected
    assert len({before, middle, expected}) == 3
    assert {tensor.dtype for tensor in second.learner.weights().values()} == {torch.bfloat16}


def test_updates_that_round_away_add_up(tmp_path: Path) -> None:
    """One step too small for 16 bits changes next to nothing; many of them change the weights."""
    folder = families.make(QWEN3, tmp_path)
    training = trained(folder, optimizer=OptimizerSection(lr=1e-5, warmup_steps=0))
    name = "model.layers.0.mlp.up_proj.weight"

    def weight() -> torch.Tensor:
        return training.learner.weights()[name].clone()

    def changed(before: torch.Tensor) -> float:
        return float((weight() != before).float().mean())

    start = weight()
    training.learner.step(batch_of(random_samples(8)))
    after_one = changed(start)
    for _ in range(30):
        training.learner.step(batch_of(random_samples(8)))
    assert after_one < 0.05
    assert changed(start) > 3 * max(after_one, 0.01)


def test_trainer_and_scorer_agree_in_sixteen_bits(tmp_path: Path) -> None:
    """Of the version just published both say the same of a token, but for the order of sums."""
    folder = families.make(QWEN3, tmp_path / "model", initializer_range=0.1)
    training = trained(folder, optimizer=FAST)
    learned(training, range(2))
    server = FileWeightServer(tmp_path / "weights", keep=1)
    published = announced(server, server.publish(0, training.learner.weights()))
    scorer = scorer_of(folder, dtype=BF16)
    scorer.pull(published, FileWeightChannel())
    (micro, *_) = batch_of(random_samples(8)).micro_batches
    with torch.no_grad():
        policy_N = training.learner._passes.score(micro).logprobs_N
    rows = [ids[real] for ids, real in zip(micro.token_ids_BT, micro.real_BT, strict=True)]
    scores = scorer.score([TokenSequence(token_ids=r.astype(np.int32)) for r in rows], 0, 1.0)
    proximal_N = np.concatenate(
        [s.logprobs[m[: len(s.logprobs)]]
         for s, m in zip(scores, micro.loss_mask_BT, strict=True)]
    )  # fmt: skip
    np.testing.assert_allclose(policy_N.numpy(), proximal_N, rtol=0, atol=0.02)
    assert layout_of(training.learner.weights()) == published.layout


@pytest.mark.parametrize("dtype", ["float32", BF16])
@pytest.mark.parametrize("name", [QWEN3, "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_activations_computed_again_give_the_same_bits(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """A step that holds only each layer's input is the step that holds everything."""
    folder = families.make(name, tmp_path)
    plain = learned(trained(folder, dtype=dtype, optimizer=FAST), range(2))
    again = trained(folder, dtype=dtype, optimizer=FAST, activation_checkpointing=True)
    calls: list[int] = []
    model: Any = again.learner._shards.model
    body = model.get_decoder()
    first = (body.h if name == "GPT2LMHeadModel" else body.layers)[0]
    norm = first.ln_1 if name == "GPT2LMHeadModel" else first.input_layernorm
    norm.register_forward_hook(lambda *_: calls.append(1))
    again.learner.step(batch := batch_of(random_samples(8)))
    assert len(calls) == 2 * len(batch.micro_batches)  # once more in each backward
    assert learned(again, range(1, 2)) == plain


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(EngineError, match=r"trainer\.activation_checkpointing"):
        recompute_activations(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", [QWEN3, "LlamaForCausalLM", "MixtralForCausalLM", "MptForCausalLM",
                                  "Gemma3ForCausalLM", "Gemma2ForCausalLM"])  # fmt: skip
def test_plain_causality_is_the_mask_of_right_padded_rows(name: str, tmp_path: Path) -> None:
    """Where no mask is handed over, real tokens score as with one; windows and caps keep theirs."""
    model = load_model(families.make(name, tmp_path))
    attention = attention_of(model)
    ids_BT, real_BT = right_padded([[3, 5, 7, 4, 9, 30, 8, 2], [6, 20, 11]], 0)
    is_plain = attention.right_padded(real_BT) is None
    assert is_plain == (name in {QWEN3, "LlamaForCausalLM"})
    chosen_BT = real_BT & (torch.arange(8) > 0)
    ones_N = torch.ones(int(chosen_BT.sum()))
    with torch.no_grad():
        found, expected = (
            TokenScorer(model, mask)(ids_BT, real_BT, chosen_BT, ones_N).logprobs_N
            for mask in (attention.right_padded, attention.causal)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    short_BT = real_BT[:, :4]
    if name == "MixtralForCausalLM":  # a window of five sees all of four
        assert attention.right_padded(short_BT) is None
