"""The batched cache against full forwards, over joins, leaves, growth and shifts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rlstreams.workers.engines.base import SampleRequest, Sampling
from rlstreams.workers.engines.decode import CacheDecoder, Generation
from rlstreams.workers.model.model import causal_mask, load_model, right_padded
from rlstreams.workers.model.routing import RouterCapture

DEMO_MODEL = Path(__file__).parents[2] / "infra" / "examples" / "demo" / "model"
MAX_TOKENS = 128


@cache
def moe() -> torch.nn.Module:
    return load_model(DEMO_MODEL)


@cache
def dense() -> torch.nn.Module:
    """A Llama of random weights: no experts, tied embeddings."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def decoder(model: torch.nn.Module, slots: int, num_experts: int = 8) -> CacheDecoder:
    return CacheDecoder(model, slots=slots, num_experts=num_experts, capture_experts=True)


def generation(number: int, num_prompt: int, num_new: int) -> Generation:
    ids = np.random.default_rng(number).integers(4, 100, num_prompt).astype(np.int32)
    return Generation.of(
        SampleRequest(
            sample_id=f"{number}/0/0",
            group_id=str(number),
            token_ids=ids,
            prompt_tokens=num_prompt,
            sampling=Sampling(max_new_tokens=num_new, temperature=2.0),
            seed=0,
        ),
        MAX_TOKENS,
    )


def full_forward(
    model: torch.nn.Module, token_ids: list[int]
) -> tuple[torch.Tensor, np.ndarray | None]:
    """Log-probs (T,) at temperature 2 and experts (T - 1, L, K) of one sequence by itself."""
    ids, real = right_padded([token_ids], 0)
    capture = RouterCapture(model)
    logits = model(
        input_ids=ids,
        attention_mask=causal_mask(real),
        position_ids=torch.arange(len(token_ids))[None],
        use_cache=False,
    ).logits[0, :-1]
    experts = capture.take(1)[0, :-1].numpy() if capture.num_layers else None
    capture.close()
    logprobs = torch.log_softmax(logits / 2.0, -1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0], experts


def run(one: CacheDecoder, waves: dict[int, list[Generation]]) -> list[Generation]:
    """Step until all have their limit; `waves` join before the step of their number."""
    finished: list[Generation] = []
    step = 0
    while one.running or any(number >= step for number in waves):
        if one.running:
            one.step()
        if step in waves:
            one.admit(waves[step])
        for done in [g for g in one.running if len(g.token_ids) >= g.limit]:
            one.remove(done)
            finished.append(done)
        step += 1
    return finished


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_decoding_in_a_changing_batch_equals_a_full_forward(kind: str) -> None:
    """Rows that join, leave and are moved keep their own keys, positions and experts."""
    model, num_experts = (moe(), 8) if kind == "moe" else (dense(), 0)
    waves = {
        0: [generation(0, 3, 40), generation(1, 9, 5), generation(2, 1, 20)],
        4: [generation(3, 30, 60)],  # longer than all that runs: the cache shifts
        9: [generation(4, 2, 12), generation(5, 17, 1)],
        30: [generation(6, 5, 90)],  # beyond the first columns: the cache grows
    }
    one = decoder(model, 6, num_experts)
    finished = run(one, waves)
    one.close()
    assert sorted(int(g.request.group_id) for g in finished) == list(range(7))
    for done in finished:
        token_ids = done.token_ids
        _, logprobs, experts, start = done.take_segment()
        expected, expected_experts = full_forward(model, token_ids)
        num_prompt = done.request.prompt_tokens
        np.testing.assert_allclose(logprobs, expected[num_prompt - 1 :], atol=1e-4)
        assert start == 0
        if expected_experts is None:
            assert experts is None
        else:
            assert experts is not None
            assert experts.shape == expected_experts.shape
            same = np.sort(experts, -1) == np.sort(expected_experts, -1)
            assert same.mean() > 0.99  # rounding may turn a near tie


def test_the_cache_is_used_again_when_all_have_left() -> None:
    """Waves one after another do not let it grow."""
    one = decoder(moe(), 2)
    for number in range(12):
        finished = run(one, {0: [generation(number, 7, 20)]})
        assert len(finished) == 1
    one.close()
    assert one._cache.num_columns == 64
