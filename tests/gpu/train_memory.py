"""What two steps of the built-in trainer take: peak memory, tokens a second, the same bits twice.

    python -m tests.gpu.train_memory --shape 1.7b --length 16384 --dtype bfloat16 \
        --checkpointing --kernels fused --out result.json

A Qwen3 of a published shape with random weights, made on the device; nothing is downloaded. A step
has `--sequences` rows of `--length` tokens, each a micro-batch, all but `--prompt` learnt from.
`--device cpu` measures resident memory instead; `--whole-logits` goes the way without chunks.
Run out of memory, it says so and how far it came. Names need the packages of infra/locks/vllm.txt.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LoraSection, OptimizerSection
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.base import LOGITS_BYTES
from rlstreams.workers.model.cut import Cut
from rlstreams.workers.model.model import configure_torch
from rlstreams.workers.model.recompute import recompute_activations
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.trainer.learn.optimizer import Learner
from rlstreams.workers.trainer.learn.packing import Batch, MicroBatch
from rlstreams.workers.trainer.learn.trainable import trainable_of
from rlstreams.workers.weights.layout import weight_hash

# As published for Qwen3: layers, hidden, heads, MLP, whether embeddings are tied.
SHAPES = {
    "tiny": (4, 256, 4, 768, True),
    "0.6b": (28, 1024, 16, 3072, True),
    "1.7b": (28, 2048, 16, 6144, True),
    "4b": (36, 2560, 32, 9728, True),
    "8b": (36, 4096, 32, 12288, False),
}
KERNELS = ("math", "fused", "fused-deterministic")


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


def batch_of(args: argparse.Namespace, seed: int) -> Batch:
    """Made-up rows, one a micro-batch; the scores of other policies are filled in later."""
    random = np.random.default_rng(seed)
    num_loss_tokens = args.sequences * (args.length - args.prompt)
    rows = []
    for _ in range(args.sequences):
        shape = (1, args.length)
        loss_mask_BT = np.ones(shape, np.bool_)
        loss_mask_BT[:, : args.prompt] = False
        rows.append(
            MicroBatch(
                token_ids_BT=random.integers(0, args.vocabulary, shape),
                real_BT=np.ones(shape, np.bool_),
                loss_mask_BT=loss_mask_BT,
                behavior_logprobs_BT=np.zeros(shape, np.float32),
                proximal_logprobs_BT=np.zeros(shape, np.float32),
                is_true_anchor_BT=loss_mask_BT,
                is_scored_BT=loss_mask_BT,
                is_after_pull_BT=np.zeros(shape, np.bool_),
                temperature_BT=np.ones(shape, np.float32),
                advantages_B=random.standard_normal(1).astype(np.float32),
                num_batch_loss_tokens=num_loss_tokens,
                num_batch_rows=args.sequences,
                num_batch_samples=args.sequences,
                trajectories=(),
            )
        )
    return Batch(
        micro_batches=tuple(rows),
        cut=Cut(order=tuple(range(args.sequences)), sizes=(1,) * args.sequences),
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
        logprobs_BT[row.loss_mask_BT] = learner._score(row).logprobs_N.cpu().numpy()
        rows.append(
            replace(row, behavior_logprobs_BT=logprobs_BT, proximal_logprobs_BT=logprobs_BT)
        )
    return replace(batch, micro_batches=tuple(rows))


def peak_gb(device: str) -> float:
    """Since `reset`; of the process's life on the CPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return torch.cuda.max_memory_allocated() / 1e9


def timed(device: str, work: Any) -> tuple[Any, dict[str, float]]:
    """What `work` gives, its seconds and peak."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started_s = time.monotonic()
    result = work()
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started_s
    return result, {"seconds": round(seconds, 3), "peak_gb": round(peak_gb(device), 3)}


def one_run(args: argparse.Namespace, told: dict[str, Any]) -> None:
    """Two steps from the same start; what was reached is in `told` even if it then fails."""
    model, told["make"] = timed(args.device, lambda: model_of(args))
    told["parameters"] = sum(p.numel() for p in model.parameters())
    trainable = trainable_of(model, LoraSection(rank=args.lora))
    if args.checkpointing:
        recompute_activations(model)
    mask = attention_of(model).right_padded
    section = OptimizerSection(lr=1e-5, warmup_steps=0)
    learner = Learner(model, section, LossSection(), mask=mask, trainable=trainable)
    chunk_bytes = 1 << 62 if args.whole_logits else args.chunk_mb << 20
    learner._scorer = TokenScorer(model, mask, chunk_bytes=chunk_bytes)
    if args.whole_logits:
        learner._scorer._body = None
    for number in range(2):
        empty = batch_of(args, number)
        batch, told[f"score_{number}"] = timed(args.device, lambda e=empty: on_policy(learner, e))
        result, step = timed(args.device, lambda b=batch: learner.step(b))
        step["tokens_per_s"] = round(args.sequences * args.length / step["seconds"], 1)
        told[f"step_{number}"] = step | {
            "loss": result.loss,
            "grad_norm": result.metrics["grad_norm"],
            "clip_fraction": result.metrics["clip_fraction"],
            "kl": result.metrics["kl"],
        }
    told["weight_hash"], told["hash"] = timed(args.device, lambda: weight_hash(learner.weights()))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """One run, or two and whether they gave the same bits."""
    told: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    told["versions"] = {name: version(name) for name in ("torch", "transformers")}
    if args.device != "cpu":
        told["device"] = torch.cuda.get_device_name()
        told["device_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
    runs: list[dict[str, Any]] = []
    told["runs"] = runs
    for _ in range(args.runs):
        runs.append({})
        try:
            one_run(args, runs[-1])
        except torch.OutOfMemoryError as err:
            runs[-1]["out_of_memory"] = str(err)[:300]
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    hashes = [run.get("weight_hash") for run in runs]
    if args.runs > 1:
        told["bit_equal"] = None not in hashes and len(set(hashes)) == 1
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=256, help="of these not learnt from")
    parser.add_argument("--sequences", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--kernels", choices=KERNELS, default="fused")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights learn")
    parser.add_argument("--chunk-mb", type=int, default=LOGITS_BYTES >> 20)
    parser.add_argument("--whole-logits", action="store_true", help="no chunks, all positions")
    parser.add_argument("--runs", type=int, default=2, help="2: also whether bits are equal")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure_torch(
        args.threads,
        args.device,
        fused=args.kernels != "math",
        in_one_order=args.kernels != "fused",
    )
    text = json.dumps(measured(args), indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
