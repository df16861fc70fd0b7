"""FLOPs of a step beside a count by hand, and for whom the trainer waited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.training.step_cost import ModelFlops, StepCost, waits
from tests.heavy.trainer.trainer_stand import scored
from tests.late import Late

qwen3, qwen3_moe = Late("transformers.models.qwen3"), Late("transformers.models.qwen3_moe")

SHAPE = {
    "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32,
}  # fmt: skip
ATTENTION = 8 * 4 * (2 * 4 + 2 * 2)  # weights of a layer: queries, output; keys, values


def test_flops_are_those_of_the_mathematics() -> None:
    """Norms and embeddings need none; adapters no gradient of frozen weights."""
    model = qwen3.Qwen3ForCausalLM(qwen3.Qwen3Config(**SHAPE, tie_word_embeddings=True))
    by_hand = 3 * (ATTENTION + 3 * 8 * 32)
    found = ModelFlops.of(model, has_adapters=False)
    assert (found.token, found.learnt, found.pair) == (6 * by_hand, 6 * 50 * 8, 12 * 3 * 16)
    assert ModelFlops.of(model, has_adapters=True).token == 4 * by_hand
    spans = [(8, 0)]  # 8 tokens, of which 5 are learnt from
    assert found.step(spans, 5) == 8 * found.token + 5 * found.learnt + 36 * found.pair
    # Another begins with 6 of these.
    assert found.step([(8, 0), (8, 6)], 5) - found.step(spans, 5) == (
        2 * found.token + (7 + 8) * found.pair
    )
    device = "NVIDIA H200"
    cost = StepCost(model, device, "bfloat16", TrainerSection(ranks=2))
    cost._has_gpu = False  # it is a name alone
    expected = found.step(spans, 5) / (0.5 * 2 * 989.4e12)
    assert cost.figures(spans, 5, 0.5) == {"mfu": pytest.approx(expected)}
    assert StepCost(model, "cpu", "bfloat16", TrainerSection()).figures(spans, 5, 1) == {}


def test_of_experts_the_chosen_share_counts() -> None:
    """Two of eight; the router whole."""
    config = qwen3_moe.Qwen3MoeConfig(
        **SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    )
    found = ModelFlops.of(qwen3_moe.Qwen3MoeForCausalLM(config), has_adapters=False)
    assert found.token == 6 * 3 * (ATTENTION + 8 * 8 + 2 * 3 * 8 * 16)


def test_who_the_trainer_waited_for() -> None:
    """Until the sample that was scored last had been sampled, for samples; then for its score."""
    early, late = (
        replace(one, scored_at_ms=at, trajectory=replace(one.trajectory, finished_at_ms=at - 300))
        for one, at in ((scored(0, 0, 0), 1000), (scored(0, 1, 0), 2000))
    )
    assert waits(900, 2100, [early, late]) == {"wait_samples_s": 0.8, "wait_scores_s": 0.4}
    assert waits(1900, 2100, [late, early]) == {"wait_samples_s": 0.0, "wait_scores_s": 0.2}
    assert waits(2500, 2500, [early, late]) == {"wait_samples_s": 0.0, "wait_scores_s": 0.0}
