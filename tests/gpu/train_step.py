"""A training step on one GPU: tokens a second, padding, hash, the same bits; beside plain torch.

    python -m tests.gpu.train_step --out result.json                          # 1.7B, an H200
    python -m tests.gpu.train_step --shape 0.6b --bin 8192 --samples 64       # 24 GB
    python -m tests.gpu.train_step --cases bins-compiled --profile
    python -m tests.gpu.train_step --group 8 --lengths constant --cases bins-compiled,bins-shared

A Qwen3 of a published shape with random weights, made on the device; nothing is downloaded. A step
has `--samples` of `--length` tokens, or lognormal lengths of that mean and at most 8,192; all but
the prompt is learnt from. `padded`: rows, layers as they are; `bins`: packed; `bins-compiled`: what
a trainer does of samples without a common prompt; `bins-shared`: and of groups of `--group`, whose
prompts a bin has once; `plain`: a torch loop with compiled layers, without ratios, entropy or one
order. With `--group` all cases have the same tokens; rates count those of whole samples.
FLOPs: 6 a matmul weight and token (head: learnt tokens), causal attention; no recomputation.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model import bins
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.cut import cut_bins, cut_rows
from rlstreams.workers.model.layers import recompute_activations
from rlstreams.workers.model.model import configure_torch
from rlstreams.workers.model.prefixes import Prefixes, Tokens
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.weights.layout import weight_hash
from tests.gpu.kernel_times import traced
from tests.gpu.qwen3 import SHAPES, batch_of, grouped, model_of, on_policy

PEAK = 989e12  # H100 and H200, bf16
CASES = ("padded", "bins", "bins-compiled", "plain")  # and `bins-shared`, with `--group`


def lengths_of(args: argparse.Namespace, kind: str) -> list[int]:
    """Tokens of each sample."""
    if kind == "constant":
        return [args.length] * args.samples
    random = np.random.default_rng(1)
    drawn = random.lognormal(np.log(args.length) - 0.32, 0.8, args.samples)
    return [int(n) for n in drawn.clip(args.prompt + 16, 8192)]


def synchronized() -> float:
    """Seconds, with nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its seconds."""
    started_s = synchronized()
    result = work()
    return result, synchronized() - started_s


def learner_of(args: argparse.Namespace, model: Any, case: str, told: dict[str, Any]) -> Learner:
    """As a trainer makes it, or with a part left out."""
    scorer = TokenScorer(model, attention_of(model).right_padded)
    why_padded = "not asked for"
    if case.startswith("bins"):
        why_padded = bins.take_documents(scorer, args.device)
        scorer.head.holds_logits = True
        told["why_padded"] = why_padded
    if is_shared := case == "bins-shared":
        told["why_unshared"] = bins.why_unshared(scorer)
    if case in ("bins-compiled", "bins-shared"):
        model.requires_grad_()  # weights that learn ask for their gradient before they are compiled
        work = partial(bins.compile_for_bins, scorer, args.bin, shares=is_shared)
        why, seconds = timed(work)
        told |= {"why_eager": why, "compile_s": round(seconds, 1)}
    if args.checkpointing:
        scorer.head.holds_logits = False
        recompute_activations(model)
    section = OptimizerSection(lr=args.lr, warmup_steps=0)
    return Learner.of(model, section, LossSection(), scorer=scorer, why_padded=why_padded)


def ours(args: argparse.Namespace, case: str, lengths: list[int], told: dict[str, Any]) -> None:
    """Warm up, time steps with their hashes, and do the first one again."""
    model = model_of(args)
    learner = learner_of(args, model, case, told)
    start = {n: t.to("cpu", copy=True) for n, t in learner.weights().items()}
    samples = grouped(args, lengths, args.group) if args.group else None
    prefixes = None
    if case == "bins-shared":
        families = [index // args.group for index in range(len(lengths))]
        prefixes = Prefixes([Tokens(sample) for sample in samples], families)
    if learner.why_padded:
        cut = cut_rows(lengths, args.bin)
    else:
        cut = cut_bins(lengths, args.bin, prefixes)
    told["bins"] = list(cut.bins)
    batch = on_policy(learner, batch_of(args, lengths, cut, 2, samples, prefixes))
    hashes = []
    for _ in range(2):
        learner.load(start, {}, 0)
        result, told["first_s"] = timed(lambda: learner.step(batch))
        hashes.append(weight_hash(learner.weights()))
    told |= {"hash": hashes[0][:16], "same_bits": len(set(hashes)) == 1, "loss": result.loss}
    step_s, hash_s = [], []
    for _ in range(args.steps):
        result, seconds = timed(lambda: learner.step(batch))
        step_s.append(seconds)
        hash_s.append(timed(lambda: weight_hash(learner.weights()))[1])
    computed, real = result.metrics["tokens_computed"], result.metrics["tokens_real"]
    told |= {
        "tokens_shared": result.metrics["tokens_shared"],
        "tokens_computed": computed,
        "grad_norm": result.metrics["grad_norm"],
        "micro_batches": len(batch.micro_batches),
        "padding": round(computed / real, 4),
        "hash_s": round(float(np.median(hash_s)), 3),
    }
    told |= figures(args, lengths, float(np.median(step_s)), float(np.median(hash_s)))
    if args.profile:
        _, told["profile"] = traced(lambda: learner.step(batch))
        _, told["hash_profile"] = traced(lambda: weight_hash(learner.weights()))


def figures(
    args: argparse.Namespace, lengths: list[int], step_s: float, hash_s: float
) -> dict[str, Any]:
    """Rates of one step."""
    layers, hidden, heads, width, _ = SHAPES[args.shape]
    kv_heads, own = min(8, heads // 2), 128
    by_layer = hidden * own * (2 * heads + 2 * kv_heads) + 3 * hidden * width
    total, learnt = sum(lengths), sum(lengths) - args.prompt * len(lengths)
    attended = sum(n * (n + 1) / 2 for n in lengths)
    flops = 6 * by_layer * layers * total + 6 * args.vocabulary * hidden * learnt
    flops += 12 * layers * heads * own * attended
    return {
        "tokens": total,
        "step_s": round(step_s, 3),
        "tokens_per_s": round(total / step_s),
        "tokens_per_s_hashed": round(total / (step_s + hash_s)),
        "mfu": round(flops / step_s / PEAK, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if args.device != "cpu" else 0,
    }


def plain(args: argparse.Namespace, lengths: list[int], told: dict[str, Any]) -> None:
    """Compiled layers and head chunks, rows of one length side by side, float32 masters."""
    if len(set(lengths)) > 1:
        told["skipped"] = "rows of one length only"
        return
    torch.use_deterministic_algorithms(False)
    model = model_of(args).train().requires_grad_(True)
    body, matrix = model.model, model.lm_head.weight
    for layer in body.layers:
        layer.compile()
    params = list(model.parameters())
    masters = [p.detach().float().clone() for p in params]
    adam = torch.optim.AdamW(masters, lr=1e-6, fused=True, betas=(0.9, 0.95), weight_decay=0.0)

    def chunk_loss(hidden: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, matrix).float()
        return (torch.nn.functional.cross_entropy(logits, ids, reduction="none") * weight).sum()

    score = torch.compile(chunk_loss)
    at_once = args.bin // args.length
    ids_BT = torch.randint(4, args.vocabulary, (len(lengths), args.length), device=args.device)
    weight_B = torch.randn(len(lengths), device=args.device) / ids_BT.numel()

    def step() -> None:
        for x_BT, w_B in zip(ids_BT.split(at_once), weight_B.split(at_once), strict=True):
            out = body(input_ids=x_BT, use_cache=False).last_hidden_state
            hidden = out[:, args.prompt - 1 : -1].flatten(0, 1)
            taken = x_BT[:, args.prompt :].reshape(-1)
            weight = w_B[:, None].expand(-1, args.length - args.prompt).reshape(-1)
            loss: Any = 0
            chunks = (t.split(4096) for t in (hidden, taken, weight))
            for chunk in zip(*chunks, strict=True):
                loss = loss + checkpoint(
                    score, *chunk, use_reentrant=False, preserve_rng_state=False
                )
            loss.backward()
            for p, m in zip(params, masters, strict=True):
                m.grad = p.grad.float() if m.grad is None else m.grad.add_(p.grad)
                p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    step()
    seconds = [timed(step)[1] for _ in range(args.steps)]
    told |= figures(args, lengths, float(np.median(seconds)), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.7b", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=1224)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--bin", type=int, default=16384)
    parser.add_argument("--group", type=int, default=0, help="samples with one prompt; 0: none")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--lengths", default="constant,lognormal")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(dtype="bfloat16", lr=1e-6)
    args = parser.parse_args()
    device = args.device if args.device == "cpu" else torch.cuda.get_device_name()
    told: dict[str, Any] = {"device": device, "torch": torch.__version__, "cases": {}}
    told |= {name: getattr(args, name) for name in ("shape", "samples", "length", "prompt", "bin")}
    for kind in args.lengths.split(","):
        lengths = lengths_of(args, kind)
        for case in args.cases.split(","):
            gc.collect()
            torch._dynamo.reset()
            configure_torch(4, args.device, fused=True, in_one_order=True)
            if args.device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            found = told["cases"][f"{kind} {case}"] = {}
            try:
                if case == "plain":
                    plain(args, lengths, found)
                else:
                    ours(args, case, lengths, found)
            except Exception as err:  # one case must not cost the others
                found["error"] = f"{type(err).__name__}: {err}"[:1000]
                if os.environ.get("RAISE"):
                    raise
            profile = found.get("profile", {})
            shown = {key: value for key, value in found.items() if "profile" not in key}
            lines = [*profile.get("gaps", ()), *profile.get("kernels", ())]
            sys.stdout.write("\n  ".join([f"{kind} {case} {json.dumps(shown)}", *lines]) + "\n")
            sys.stdout.flush()
            if args.out:
                args.out.write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
