"""Rows of documents: what padded rows give; families that differ are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstreams.workers.compute import fused_fault
from rlstreams.workers.compute.layers import layers_of
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.compute.mesh import Mesh
from rlstreams.workers.compute.spec import ModelSpec
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model import bins, documents
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.documents import ATTENTION, Documents, use_documents
from rlstreams.workers.model.model import configure_torch, load_model
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.documents_on_cpu import one_by_one, take_documents_on_cpu
from tests.unit.trainer.trainer_builders import packed_within, random_samples

configure_torch(1)
SPEC = ModelSpec(folder=Path(), dtype="float32", bin_tokens=512, asked_by="trainer")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    take_documents_on_cpu(monkeypatch.setattr)


def scorer_of(name: str, folder: Path) -> TokenScorer:
    model: Any = load_model(families.make(name, folder)).requires_grad_(True)
    return TokenScorer(model, attention_of(model).right_padded)


@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"]
)
def test_families_take_documents(name: str, tmp_path: Path) -> None:
    """Plain layers, a window in all or some, experts."""
    scorer = scorer_of(name, tmp_path)
    assert not bins.take_documents(scorer, "cpu")
    assert scorer.model.config._attn_implementation == ATTENTION  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Qwen3NextForCausalLM", "documents in one row are .* nats .* off"),
        ("GptOssForCausalLM", "its attention is eager"),
    ],
)
def test_a_family_that_differs_keeps_padded_rows(name: str, reason: str, tmp_path: Path) -> None:
    """A state runs on into the next document; sinks have no such kernel."""
    scorer = scorer_of(name, tmp_path)
    before = scorer.model.config._attn_implementation  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(bins.take_documents(scorer, "cpu"))
    assert scorer.model.config._attn_implementation == before  # type: ignore[union-attr]


def test_roundings_of_large_logits_are_no_difference() -> None:
    """In bfloat16 a logit of 129 has neighbours 1 apart; a mistake is in tokens side by side."""
    random = torch.Generator().manual_seed(0)
    large_N = -43 * torch.rand(650, generator=random)
    once_N, beyond_N = large_N.clone(), large_N.clone()
    once_N[7] += 0.9
    beyond_N[-26:] += 0.26  # as tokens beyond a window that is not kept
    low = torch.bfloat16
    assert not bins.difference_of(once_N, large_N, low)
    small_N = large_N / 10
    assert "0.9 nats" in bins.difference_of(small_N + (once_N - large_N), small_N, low)
    assert "0.26 in a row" in bins.difference_of(beyond_N, large_N, low)
    assert "nan" in bins.difference_of(large_N * torch.nan, large_N, low)
    assert bins.difference_of(once_N, large_N, torch.float32)
    assert not bins.difference_of(large_N + 5e-4, large_N, torch.float32)


def test_a_step_in_bins_is_the_step_of_padded_rows(tmp_path: Path) -> None:
    """Loss, metrics and gradient agree; twice the same bits; less is computed."""
    samples = random_samples(9)
    advantages = torch.linspace(-1, 1, 9).numpy()
    results, hashes = [], []
    for in_bins in (False, True, True):
        scorer = scorer_of("Qwen3ForCausalLM", tmp_path)
        use_documents(scorer.model)
        batch = packed_within(
            samples, advantages, [], policy_version=2, token_budget=48, in_bins=in_bins
        )
        assert len(batch.micro_batches) > 1
        learner = Learner.of(scorer.model, OptimizerSection(), LossSection(), scorer=scorer)
        results.append(learner.step(batch))
        hashes.append(weight_hash(learner.weights()))
    rows, packed, again = results
    assert packed == again
    assert hashes[1] == hashes[2]
    assert packed.loss == pytest.approx(rows.loss, rel=1e-4)
    computed = {"tokens_computed": packed.metrics["tokens_computed"]}
    assert rows.metrics | computed == pytest.approx(packed.metrics, rel=1e-3, abs=1e-6)


def test_what_does_not_compile_is_computed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told, and layers are the library's: the plain kernel's lengths are data."""
    monkeypatch.setattr(documents, "_fused", one_by_one)
    scorer = scorer_of("Qwen3ForCausalLM", tmp_path)
    use_documents(scorer.model)
    assert "data-dependent" in bins.compile_for_bins(scorer, 128)
    layers = [m for n, m in scorer.model.named_modules() if n.endswith("layers.0")]
    assert layers
    assert not any("compile" in repr(layer.forward) for layer in layers)
    assert not scorer.head.is_compiled


class _Doubled(torch.autograd.Function):
    """The same output with twice the gradient."""

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def _doubled_weights(forward: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
    """The same output and gradient of what comes in, with twice the gradient of weights."""
    once = forward(*args, **kwargs)
    again = forward(args[0].detach(), *args[1:], **kwargs)
    found: torch.Tensor = once + (again - again.detach())
    return found


def _layers_compiled_by(
    monkeypatch: pytest.MonkeyPatch, flawed: tuple[int, ...], *, of_weights: bool = False
) -> list[int]:
    """Have layers "compiled", flawed in rows of 128 where as many operations are fused; the bounds
    of fusion under which layers were called, as they are."""
    bounds: list[int] = []

    def compiled(forward: Any, **_: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_layer, fused = hasattr(forward, "__self__"), torch._inductor.config.max_fusion_size
            if is_layer:
                bounds.append(fused)
            if not is_layer or fused not in flawed or args[0].shape[1] != 128:
                return forward(*args, **kwargs)
            if of_weights:
                return _doubled_weights(forward, args, kwargs)
            return _Doubled.apply(forward(*args, **kwargs))

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    return bounds


@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize(("flawed", "reason"), [((64,), ""), ((64, 1), "off in a row of 128")])
def test_a_compiled_gradient_that_differs_is_not_learnt_from(
    flawed: tuple[int, ...],
    reason: str,
    of_weights: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In rows of one length: then kernels are not fused; if that differs too, none is compiled."""

    _layers_compiled_by(monkeypatch, flawed, of_weights=of_weights)
    scorer = scorer_of("Qwen3ForCausalLM", tmp_path)
    use_documents(scorer.model)
    assert reason in bins.compile_for_bins(scorer, 512)
    layers = [m for n, m in scorer.model.named_modules() if n.endswith("layers.0")]
    assert [("forward" in vars(layer), "call" in repr(layer.forward)) for layer in layers] == [
        (True, not reason)
    ]


def test_a_later_start_compiles_no_fused_layers_that_differed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares those without fusion all the same, and tries again where anything is other."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))

    def bounds_of_start(flawed: tuple[int, ...], reason: str = "", **changes: object) -> set[int]:
        bounds = _layers_compiled_by(monkeypatch, flawed)
        scorer = scorer_of("Qwen3ForCausalLM", tmp_path)
        spec = replace(SPEC, folder=tmp_path, **changes)
        found = layers_of(spec, Mesh(device="cpu"), scorer).why_eager
        assert (reason in found) if reason else (found == "")
        return set(bounds)

    assert {64, 1} == bounds_of_start((64,))
    assert {1} == bounds_of_start((64,))
    assert {1} == bounds_of_start((64, 1), "off in a row of 128")
    assert {64, 1} == bounds_of_start((64,), bin_tokens=256)  # rows of other lengths
    monkeypatch.setattr(fused_fault.metadata, "version", lambda _: "newer")
    assert {64} == bounds_of_start(())
    assert {64} == bounds_of_start(())  # layers that do not differ are compared each time


def test_documents_that_do_not_fit_a_row() -> None:
    """A longer sum, or one without a token, is refused by its lengths."""
    with pytest.raises(ValueError, match=r"sequences of \[3, 6\] tokens in a row of 8"):
        Documents.of([3, 6], 8)
    with pytest.raises(ValueError, match=r"\[3, 0\]"):
        Documents.of([3, 0], 8)
    assert Documents.of([3, 2], 8).extent.tolist() == [3, 3]


def test_a_row_grows_by_a_document() -> None:
    """As if it had been given with the others."""
    for lengths, rest in (([3, 2], 3), ([6, 2], 0)):
        longer, expected = (
            Documents.of(lengths, 8).longer(2),
            Documents.of([*lengths, rest or 2], 10),
        )
        assert longer.inputs().keys() == expected.inputs().keys()
        for name in ("positions_1T", "starts", "extent"):
            assert torch.equal(getattr(longer, name), getattr(expected, name)), name
