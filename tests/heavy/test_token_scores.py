"""Log-probs of chosen tokens, chunk by chunk: those of the whole forward, and the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.model import token_scores
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.head import Head
from rlstreams.workers.model.model import causal_mask, configure_torch, load_model, right_padded
from rlstreams.workers.model.token_scores import (
    TokenScorer,
    ValueHead,
    score_tokens,
)
from rlstreams.workers.trainer.learn.critic import value_losses
from tests import families

configure_torch(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

ROW_BYTES = 4 * families.VOCABULARY
IDS_BT, REAL_BT = right_padded([[3, 5, 7, 4, 9, 30, 8, 2], [6, 20, 11], [4, 4, 5, 40, 41]], 0)
CHOSEN_BT = REAL_BT & (torch.arange(8) >= 2)
TEMPERATURE_N = torch.linspace(0.5, 1.5, int(CHOSEN_BT.sum()))
# Soft caps, a scale, tied embeddings, a body of two levels, experts, plain.
HEADS = ("Gemma2ForCausalLM", "CohereForCausalLM", "Qwen2ForCausalLM", "OPTForCausalLM",
         "MixtralForCausalLM", "Qwen3ForCausalLM")  # fmt: skip


def of_whole(model: Any) -> Any:
    """Scores by the model's forward over everything."""
    positions_BT = torch.arange(IDS_BT.shape[1]).expand_as(IDS_BT)
    logits_BTV = model(
        input_ids=IDS_BT,
        attention_mask=attention_of(model).causal(REAL_BT),
        position_ids=positions_BT,
        use_cache=False,
    ).logits
    return score_tokens(logits_BTV[:, :-1][CHOSEN_BT[:, 1:]], IDS_BT[CHOSEN_BT], TEMPERATURE_N)


def gradients(model: Any, scores: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    (scores.logprobs_N * torch.linspace(-1, 1, len(scores.logprobs_N))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", HEADS)
def test_chunks_give_the_whole_forward_s_scores_and_gradient(name: str, tmp_path: Path) -> None:
    """Two rows at a time or all at once; twice the same bits."""
    model: Any = load_model(families.make(name, tmp_path, final_logit_softcapping=3.0))
    model.requires_grad_(True)
    mask = attention_of(model).causal
    expected = of_whole(model)
    expected_gradients = gradients(model, expected)
    scorer = TokenScorer(model, mask, chunk_bytes=2 * ROW_BYTES)
    assert scorer._body is not None
    for _ in range(2):
        found = scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N)
        torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, rtol=0, atol=2e-5)
        torch.testing.assert_close(found.entropy_N, expected.entropy_N, rtol=0, atol=2e-5)
        found_gradients = gradients(model, found)
        torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-3, atol=2e-5)
    again = gradients(model, scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N))
    assert all(torch.equal(again[key], found_gradients[key]) for key in again)
    with torch.no_grad():
        at_once = TokenScorer(model, mask)(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N)
    torch.testing.assert_close(at_once.logprobs_N, expected.logprobs_N, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Qwen3ForCausalLM"])
def test_other_tokens_are_scored_too(name: str, tmp_path: Path) -> None:
    """The likeliest ones, and those that are asked for: as the whole forward has them, with its
    gradient, in chunks or at once."""
    model: Any = load_model(families.make(name, tmp_path, final_logit_softcapping=3.0))
    model.requires_grad_(True)
    mask, places = attention_of(model).causal, (CHOSEN_BT.flatten().nonzero()[:, 0] - 1)
    positions_BT = torch.arange(IDS_BT.shape[1]).expand_as(IDS_BT)
    logits_BTV = model(
        input_ids=IDS_BT, attention_mask=mask(REAL_BT), position_ids=positions_BT, use_cache=False
    ).logits
    whole_NV = (logits_BTV.flatten(0, 1)[places] / TEMPERATURE_N[:, None]).log_softmax(-1)
    expected = whole_NV.topk(3, -1)
    for chunk_bytes in (2 * ROW_BYTES, 1 << 20):
        scorer = TokenScorer(model, mask, chunk_bytes=chunk_bytes)
        found = scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N, None, 3)
        assert found.top_NK is not None
        assert torch.equal(found.top_ids_NK, expected.indices)
        torch.testing.assert_close(found.top_NK, expected.values, rtol=0, atol=2e-5)
        ids_NK = expected.indices.flip(0).contiguous()
        asked = scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N, None, ids_NK)
        assert asked.top_NK is not None
        own_NK = whole_NV.gather(-1, ids_NK)
        torch.testing.assert_close(asked.top_NK, own_NK, rtol=0, atol=2e-5)
        weights_NK = torch.linspace(-1, 1, own_NK.numel()).view_as(own_NK)
        both = [
            torch.autograd.grad((t * weights_NK).sum(), [*model.parameters()], retain_graph=True)
            for t in (asked.top_NK, own_NK)
        ]
        torch.testing.assert_close(*both, rtol=1e-3, atol=2e-5)
        plain = scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N)
        torch.testing.assert_close(asked.logprobs_N, plain.logprobs_N, rtol=0, atol=2e-5)


def test_a_head_is_the_same_up_to_the_roundings_of_its_logits() -> None:
    """Gemma 3 has some of 67, where neighbours in bfloat16 are 0.5 apart; a cap is seen anyway."""
    expected = torch.tensor([67.0, -3.0], dtype=torch.bfloat16)
    one_off = torch.tensor([67.5, -3.0], dtype=torch.bfloat16)
    capped = 30 * torch.tanh(expected / 30)
    found = [token_scores._is_alike(other, expected, 0.25) for other in (one_off, capped)]
    assert found == [True, False]
    assert not token_scores._is_alike(one_off.float(), expected.float(), 1e-3)


def test_a_value_head_s_gradient_equals_finite_differences(tmp_path: Path) -> None:
    """Of the values' loss, in the head's parameters: it is quadratic in them, so a central
    difference is exact but for rounding; and in a weight of the trunk."""
    model: Any = load_model(families.make("Qwen3ForCausalLM", tmp_path)).requires_grad_(True)
    scorer = TokenScorer(model, attention_of(model).causal)
    head = scorer.value_head = ValueHead(model.config.hidden_size, "cpu")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(len(head.weight), generator=draw))
    returns_N = torch.randn(len(TEMPERATURE_N), generator=draw)
    by = LossSection(advantage="gae", value_clip=0.0)

    def loss() -> torch.Tensor:
        scores = scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N)
        assert scores.values_N is not None
        values_N = scores.values_N
        return value_losses(values_N, torch.zeros_like(values_N), returns_N, by)[0].sum()

    norm = model.model.norm.weight
    slopes = torch.autograd.grad(loss(), [head.weight, head.bias, norm])
    steps = (0.1, 0.1, 1e-2)
    for parameter, slope, h in zip((head.weight, head.bias, norm), slopes, steps, strict=True):
        for at in range(min(len(parameter), 5)):
            with torch.no_grad():
                near = []
                for sign in (1, -2, 1):  # there, to the other side, back
                    parameter[at] += sign * h
                    near.append(float(loss()))
            expected = (near[0] - near[1]) / (2 * h)
            assert float(slope[at]) == pytest.approx(expected, rel=2e-3, abs=1e-2)


def test_a_head_that_is_not_the_last_step_keeps_the_whole_forward(tmp_path: Path) -> None:
    """Logits that depend on what the head cannot be told: measured, and nothing is taken apart."""
    model: Any = load_model(families.make("LlamaForCausalLM", tmp_path))
    plain = type(model).forward

    def forward(input_ids: torch.Tensor, **inputs: Any) -> Any:
        output = plain(model, input_ids=input_ids, **inputs)
        output.logits = output.logits + input_ids[..., None] * torch.arange(families.VOCABULARY)
        return output

    model.forward = forward
    scorer = TokenScorer(model, attention_of(model).causal, chunk_bytes=2 * ROW_BYTES)
    assert scorer._body is None
    with torch.no_grad():
        found = scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N)
        expected = of_whole(model)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("holds", [False, True])
def test_the_logits_of_all_chosen_tokens_never_exist_at_once_in_float32(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is given no more rows than the bound allows; once, where logits are held."""
    model: Any = load_model(families.make("LlamaForCausalLM", tmp_path)).requires_grad_(True)
    rows: list[int] = []
    logits = Head.logits

    def counted(head: Head, hidden_nH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_nH))
        return logits(head, hidden_nH, weight_VH)

    monkeypatch.setattr(Head, "logits", counted)
    scorer = TokenScorer(model, causal_mask, chunk_bytes=3 * ROW_BYTES)
    scorer.head.holds_logits = holds
    gradients(model, scorer(IDS_BT, REAL_BT, CHOSEN_BT, TEMPERATURE_N))
    num_chosen = int(CHOSEN_BT.sum())
    assert max(rows) == 3
    assert sum(rows) == num_chosen * (1 if holds else 2)
    assert np.isfinite([float(p.grad.abs().sum()) for p in model.parameters()]).all()
