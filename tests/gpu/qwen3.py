"""Qwen3 models of published shapes with random weights, and made-up batches to train them on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.model.cut import Cut
from rlstreams.workers.model.prefixes import Prefixes
from rlstreams.workers.trainer.learn.packing import Batch, MicroBatch

# As published for Qwen3: layers, hidden, heads, MLP, whether embeddings are tied.
SHAPES = {
    "tiny": (4, 256, 4, 768, True),
    "0.6b": (28, 1024, 16, 3072, True),
    "1.7b": (28, 2048, 16, 6144, True),
    "4b": (36, 2560, 32, 9728, True),
    "8b": (36, 4096, 32, 12288, False),
}


def model_of(args: argparse.Namespace) -> Any:
    """Random weights of one seed, in eval mode."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    layers, hidden, heads, width, is_tied = SHAPES[args.shape]
    config = Qwen3Config(
        vocab_size=args.vocabulary, hidden_size=hidden, intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=min(8, heads // 2),
        head_dim=128, max_position_embeddings=max(40960, args.length), tie_word_embeddings=is_tied,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        with torch.device(args.device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def grouped(args: argparse.Namespace, lengths: list[int], size: int, seed: int = 3) -> Any:
    """Made-up tokens of samples, of which groups of that size have one prompt."""
    random = np.random.default_rng(seed)
    found, prompt = [], np.zeros(0, np.int64)
    for index, length in enumerate(lengths):
        if index % size == 0:
            prompt = random.integers(0, args.vocabulary, args.prompt)
        answer = random.integers(0, args.vocabulary, length - args.prompt)
        found.append(np.concatenate([prompt, answer]))
    return found


def batch_of(
    args: argparse.Namespace,
    lengths: list[int],
    cut: Cut,
    seed: int = 2,
    samples: Any = None,
    prefixes: Prefixes | None = None,
) -> Batch:
    """Made-up samples; the scores of other policies are filled in later.

    Args:
        samples: their tokens; None: random ones.
        prefixes: theirs, if bins share tokens.
    """
    random = np.random.default_rng(seed)
    # By sample, so that a batch is the same however it is cut.
    samples = samples or [random.integers(0, args.vocabulary, length) for length in lengths]
    advantages_N = random.standard_normal(len(lengths)).astype(np.float32)
    num_loss_tokens = sum(lengths) - args.prompt * len(lengths)
    rows = []
    for number, members in enumerate(cut.members):
        own = [lengths[index] for index in members]
        shape = (len(own), max(own))
        at_T = np.arange(shape[1])[None]
        real_BT = at_T < np.array(own)[:, None]
        loss_mask_BT = real_BT & (at_T >= args.prompt)
        zeros_BT = np.zeros(shape, np.float32)
        token_ids_BT = np.zeros(shape, np.int64)
        for row, index in enumerate(members):
            token_ids_BT[row, : lengths[index]] = samples[index]
        rows.append(
            MicroBatch(
                token_ids_BT=token_ids_BT,
                real_BT=real_BT,
                loss_mask_BT=loss_mask_BT,
                behavior_logprobs_BT=zeros_BT,
                proximal_logprobs_BT=zeros_BT,
                is_true_anchor_BT=loss_mask_BT,
                is_scored_BT=loss_mask_BT,
                is_after_pull_BT=np.zeros(shape, np.bool_),
                temperature_BT=np.ones(shape, np.float32),
                advantages_B=advantages_N[list(members)],
                num_batch_loss_tokens=num_loss_tokens,
                num_batch_learnt=len(lengths),
                num_batch_samples=len(lengths),
                bin_tokens=cut.bins[number] if cut.bins else 0,
                taken=prefixes.taken(members) if prefixes else None,
            )
        )
    return Batch(
        micro_batches=tuple(rows),
        cut=cut,
        num_loss_tokens=num_loss_tokens,
        staleness={},
        anchors={},
    )


@torch.no_grad()
def on_policy(learner: Learner, batch: Batch) -> Batch:
    """The batch as if the present weights had sampled it."""
    rows = []
    for row in batch.micro_batches:
        logprobs_BT = np.zeros(row.real_BT.shape, np.float32)
        logprobs_BT[row.loss_mask_BT] = learner._passes.score(row).logprobs_N.cpu().numpy()
        rows.append(
            replace(row, behavior_logprobs_BT=logprobs_BT, proximal_logprobs_BT=logprobs_BT)
        )
    return replace(batch, micro_batches=tuple(rows))
