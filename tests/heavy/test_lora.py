"""Adapters: only they learn, what is published has them merged, and a redo gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.trainer import LoraSection, OptimizerSection, TrainerSection
from rlstreams.workers.model.model import load_model, load_weights
from rlstreams.workers.trainer.learn.trainable import Adapters
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import layout_of, weight_hash
from tests import families
from tests.unit.trainer.trainer_builders import batch_of, learned, random_samples

LORA = LoraSection(rank=4, alpha=8.0)
FAMILIES = ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"]


def training(folder: Path, lora: LoraSection = LORA) -> Training:
    return Training(folder, TrainerSection(lora=lora), threads=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_adapted_layers_change_and_keep_their_names(name: str, tmp_path: Path) -> None:
    """Version 0 is the folder to the bit; later ones fit the same model, embeddings untouched."""
    folder = families.make(name, tmp_path)
    trained = training(folder, LoraSection(rank=4, targets="q_proj|v_proj"))
    before = {n: t.clone() for n, t in trained.learner.weights().items()}
    assert trained.model_hash == weight_hash(before)
    learned(trained, range(2))
    after = trained.learner.weights()
    assert layout_of(before) == layout_of(after)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert {n for n in before if n.endswith(("q_proj.weight", "v_proj.weight"))} == changed
    load_weights(load_model(folder), after)


def test_the_policy_that_learns_is_the_one_that_is_published(tmp_path: Path) -> None:
    """The model with adapters and a plain one with the merged weights give the same bits."""
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    model: Any = load_model(folder)
    adapters = Adapters(model, LORA)
    with torch.no_grad():
        for parameter in adapters.parameters().values():
            parameter.add_(0.1)
    plain: Any = load_model(folder)
    load_weights(plain, adapters.weights())
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("num_steps", [3, 10])
def test_a_small_change_arrives_at_once(num_steps: int, tmp_path: Path) -> None:
    """In 16 bits at a learning rate of 1e-5: of what the adapters say, all but the noise of that
    many coins, in float64 from base, adapters and what is published. Rounded to nearest it was 0.5
    and 2.4 %."""
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    section = TrainerSection(lora=LORA, optimizer=OptimizerSection(lr=1e-5))
    trained = Training(folder, section, threads=1, dtype="bfloat16")
    base = {n: t.double() for n, t in trained.learner.weights().items()}
    for seed in range(num_steps):
        found = trained.learner.step(batch_of(random_samples(8, seed)))
    state = {n: t.double() for n, t in trained.learner.optimizer_tensors().items()}
    moved = whole = variance = 0.0
    for name, weight in trained.learner.weights().items():
        if f"{name}.up:value" not in state:
            continue
        change = 2.0 * state[f"{name}.up:value"] @ state[f"{name}.down:value"]
        gap = 2.0 ** (torch.frexp(base[name]).exponent - 8).double()
        share = (change.abs() / gap).clamp(max=1)
        moved += float(((weight.double() - base[name]) * change).sum())
        whole += float(change.square().sum())
        variance += float((change * gap).square().mul(share * (1 - share)).sum())
    assert abs(moved - whole) < 4 * variance**0.5
    assert 0.5 < moved / whole < 1.5
    assert found.metrics["adapter_arrived"] == pytest.approx(moved / whole, rel=1e-4)


def test_the_gradient_is_that_of_the_sum() -> None:
    """Of W + scale B A as autograd has it, to the bit in float32: no rounding is in its way."""
    draw = torch.Generator().manual_seed(0)
    weight, up, down = (torch.randn(s, generator=draw) for s in ((6, 5), (6, 2), (2, 5)))
    layer = torch.nn.Linear(5, 6, bias=False)
    layer.weight.data.copy_(weight)
    adapters = Adapters(torch.nn.Sequential(layer), LoraSection(rank=2, alpha=3.0))
    own = adapters.parameters()
    with torch.no_grad():
        own["0.weight.up"].copy_(up)
        own["0.weight.down"].copy_(down)
    inputs = torch.randn(4, 5, generator=draw)
    torch.nn.functional.linear(inputs, layer.weight).square().sum().backward()  # type: ignore[no-untyped-call]
    up.requires_grad_()
    down.requires_grad_()
    merged = weight + 1.5 * (up @ down)
    torch.nn.functional.linear(inputs, merged).square().sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(own["0.weight.up"].grad, up.grad)
    assert torch.equal(own["0.weight.down"].grad, down.grad)


@pytest.mark.parametrize(
    ("written", "read"),
    [(LoraSection(), LORA), (LORA, LoraSection()), (LORA, LoraSection(rank=2))],
)
def test_a_checkpoint_of_another_kind_is_refused(
    written: LoraSection, read: LoraSection, tmp_path: Path
) -> None:
    """Full weights, adapters, and adapters of another rank do not go on from each other."""
    folder = families.make("Qwen3ForCausalLM", tmp_path / "model")
    first = training(folder, written)
    at_one = learned(first, range(1))
    store = CheckpointStore(tmp_path / "checkpoints")
    manifest = Manifest(run="r", epoch=1, step=1, policy_version=1, weight_hash=at_one)
    first.save(store, manifest)
    second = training(folder, read)
    with pytest.raises(ValueError, match=r"written under another trainer\.lora"):
        second.restore(store, manifest)
    assert second.model_hash == weight_hash(second.learner.weights())


def merged_elsewhere(
    first: Training,
    folder: Path,
    change: Callable[[torch.Tensor], torch.Tensor],
    ending: str = "q_proj.weight",
) -> tuple[CheckpointStore, Manifest]:
    """A checkpoint whose writer came to another value in one weight."""
    weights = {name: tensor.clone() for name, tensor in first.learner.weights().items()}
    name = next(n for n in weights if n.endswith(ending))
    weights[name] = change(weights[name])
    manifest = Manifest(
        run="r", epoch=1, step=2, policy_version=2, weight_hash=weight_hash(weights)
    )
    store = CheckpointStore(folder)
    store.save(manifest, weights, first.learner.optimizer_tensors())
    return store, manifest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_other_hardware_is_taken(dtype: str, tmp_path: Path) -> None:
    """Merged there, a weight may be a rounding off: the version stays what was published, and the
    next step goes on from the adapters."""
    folder = families.make("Qwen3ForCausalLM", tmp_path / "model")
    first = Training(folder, TrainerSection(lora=LORA), threads=1, dtype=dtype)
    learned(first, range(2))
    towards = torch.tensor(torch.inf, dtype=getattr(torch, dtype))
    store, manifest = merged_elsewhere(
        first, tmp_path / "checkpoints", lambda weight: torch.nextafter(weight, towards)
    )
    second = Training(folder, TrainerSection(lora=LORA), threads=1, dtype=dtype)
    second.restore(store, manifest)
    assert manifest.weight_hash == second.weight_hash == weight_hash(second.learner.weights())
    assert learned(first, range(2, 4)) == learned(second, range(2, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_of_other_weights_are_refused(dtype: str, tmp_path: Path) -> None:
    """Where a weight without an adapter differs, the folder is another one; nothing is loaded."""
    folder = families.make("Qwen3ForCausalLM", tmp_path / "model")
    first = Training(folder, TrainerSection(lora=LORA), threads=1, dtype=dtype)
    learned(first, range(2))
    store, manifest = merged_elsewhere(
        first, tmp_path / "checkpoints", lambda weight: weight * 1.1, "input_layernorm.weight"
    )
    second = Training(folder, TrainerSection(lora=LORA), threads=1, dtype=dtype)
    with pytest.raises(ValueError, match="are not this folder's with adapters"):
        second.restore(store, manifest)
    assert second.model_hash == weight_hash(second.learner.weights())


def test_a_pattern_that_finds_no_layer_is_refused(tmp_path: Path) -> None:
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets 'no_such' is no linear layer"):
        Adapters(load_model(folder), LoraSection(rank=4, targets="no_such"))
