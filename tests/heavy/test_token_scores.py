"""Log-probs of chosen tokens, chunk by chunk: those of the whole forward, and the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.head import Head
from rlstreams.workers.model.model import causal_mask, configure_torch, load_model, right_padded
from rlstreams.workers.model.token_scores import TokenScorer, score_tokens
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
