"""The backend `megatron` on two GPUs beside the plain layers: training steps, scores, bits twice.

    python -m tests.gpu.megatron_steps --folder /tmp/models --out result.json  # or --gpus 1
    python -m tests.gpu.megatron_steps --folder /tmp/models --only mixture:pp2 --out result.json

A dense Qwen3 and a Qwen3-MoE with random weights, made in `--folder`; nothing is downloaded. First
one process with Hugging Face's layers, then megatron-core on one GPU, TP 2 and PP 2 of the dense
model, EP 2 and PP 2 of the mixture: `--steps` steps over the same rows, each layout twice. Losses,
gradient norms and weights must agree within what 16 bits allow, and both runs of a layout to the
bit. `scores` has each layout's scorer, of the same sequences under the folder's weights, beside the
plain scorer of one rank; `fsdp2` too, whose two ranks must give its bits. Exit status 1 and
`failures` say what did not agree. `--device cpu --small` tries the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.compute.team import Team, team_of
from rlstreams.workers.config.trainer import LayoutSection, OptimizerSection, TrainerSection
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.base import VISIBLE
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests.gpu.parallel_train import batch

PLAIN = "plain"
CASES: dict[str, dict[str, tuple[int, LayoutSection]]] = {
    "dense": {
        "one": (1, LayoutSection()),
        "tp2": (2, LayoutSection(tp=2)),
        "pp2": (2, LayoutSection(pp=2)),
    },
    "mixture": {
        "one": (1, LayoutSection()),
        "ep2": (2, LayoutSection(ep=2)),
        "pp2": (2, LayoutSection(pp=2)),
    },
}
LOSS_APART = 2e-2  # absolute: losses of random rows are around 0
NORM_APART = 5e-2  # relative
SCORES_APART = 0.1  # nats, of the mean token: sixteen bits, sixteen layers of random weights
FSDP2 = "fsdp2"
WEIGHTS_APART = 0.25  # of the way that weights went; Adam's first steps are signs of gradients


def made(args: argparse.Namespace, kind: str) -> Path:
    """The model's folder."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    folder: Path = args.folder / f"megatron-{kind}{'-small' if args.small else ''}"
    if (folder / "config.json").is_file():
        return folder
    hidden, layers = (128, 4) if args.small else (1024, 16)
    common = {
        "vocab_size": args.vocabulary, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": hidden // 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": hidden // 2}
    torch.manual_seed(0)
    if kind == "dense":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**common))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, norm_topk_prob=True))
    model.to(getattr(torch, args.dtype)).save_pretrained(folder)
    return folder


def run(
    args: argparse.Namespace, folder: Path, ranks: int, layout: LayoutSection | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the steps tell, and the weights after them."""
    section = TrainerSection(
        backend="fsdp2" if layout is None else "megatron",
        ranks=ranks,
        device=args.device,
        redo="exact",
        optimizer=OptimizerSection(lr=1e-5, warmup_steps=0),
        layout=layout or LayoutSection(),
    )
    losses, norms, seconds = [], [], []
    started_s = time.monotonic()
    team = team_of(args.visible[1:ranks])
    with closing(
        Training(folder, section, args.threads, args.device, args.dtype, team=team)
    ) as training:
        start_s = time.monotonic() - started_s
        for number in range(args.steps):
            in_bins = not training.learner.why_padded
            rows = batch(args, number, args.length, in_bins=in_bins)
            begun_s = time.monotonic()
            result = training.learner.step(rows)
            seconds.append(round(time.monotonic() - begun_s, 3))
            losses.append(result.loss)
            norms.append(result.metrics["grad_norm"])
        weights = {n: t.detach().cpu().clone() for n, t in training.learner.weights().items()}
        told = {
            "start_s": round(start_s, 1),
            "seconds": seconds,
            "loss": losses,
            "grad_norm": norms,
            "weight_hash": weight_hash(weights),
            "hash_where_it_lies": weight_hash(training.learner.weights()),
        }
    return told, weights


def scores(
    args: argparse.Namespace, folder: Path, ranks: int, layout: LayoutSection | None
) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    """A scorer's start and second pass in seconds, and the log-probs [tokens - 1] of each sequence.

    Args:
        layout: of megatron's layers; None: Hugging Face's, under FSDP2 if there are several ranks.
    """
    channel = FolderChannel(folder, args.dtype)
    draw = np.random.default_rng(3)
    lengths = draw.integers(args.length // 2, args.length, args.sequences)
    sequences = [
        TokenSequence(token_ids=draw.integers(0, args.vocabulary, n).astype(np.int32))
        for n in lengths
    ]
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    options |= {"token_budget": args.bin}
    if layout is not None:
        options |= {"backend": "megatron", "layout": layout}
    started_s = time.monotonic()
    team = Team(args.visible[1:ranks], owner="scorer") if ranks > 1 else None
    with closing(scorer_of(folder, team=team, **options)) as scorer:
        version = scorer.pull(channel.published, channel).policy_version
        start_s = time.monotonic() - started_s
        first = [one.logprobs for one in scorer.score(sequences, version, 1.0)]
        begun_s = time.monotonic()
        again = [one.logprobs for one in scorer.score(sequences, version, 1.0)]
        found = {
            "start_s": round(start_s, 1),
            "seconds": round(time.monotonic() - begun_s, 3),
            "equal_twice": all(map(np.array_equal, first, again)),
        }
    return found, first


def all_scores(
    args: argparse.Namespace, folder: Path, kind: str
) -> tuple[dict[str, Any], list[str]]:
    """The scorers of a kind's layouts beside the plain one of one rank, and what is too far."""
    plain, expected = scores(args, folder, 1, None)
    found, problems = {PLAIN: plain}, []
    for name, (ranks, layout) in {FSDP2: (2, None), **CASES[kind]}.items():
        if ranks > args.gpus or not is_asked(args, kind, name):
            continue
        one, logprobs = scores(args, folder, ranks, layout)
        apart = np.abs(np.concatenate(logprobs) - np.concatenate(expected))
        one |= {"mean_apart": float(apart.mean()), "most_apart": float(apart.max())}
        found[name] = one
        if not one["equal_twice"]:
            problems.append(f"{kind} {name}: the same scores came with other bits")
        if not one["mean_apart"] <= (0.0 if name == FSDP2 else SCORES_APART):
            problems.append(f"{kind} {name}: scores are {one['mean_apart']:.3g} nats apart")
        sys.stderr.write(json.dumps({f"scores {kind} {name}": one}) + "\n")
    return found, problems


def is_asked(args: argparse.Namespace, kind: str, name: str) -> bool:
    """Whether `--only` names this layout."""
    return not args.only or f"{kind}:{name}" in args.only.split(",")


def compared(
    told: dict[str, Any], plain: dict[str, Any], way: float, apart: float
) -> tuple[dict[str, float], list[str]]:
    """How far a layout is from the plain trainer, and what is too far."""
    far = {
        "loss": max(abs(a - b) for a, b in zip(told["loss"], plain["loss"], strict=True)),
        "grad_norm": max(
            abs(a / b - 1) for a, b in zip(told["grad_norm"], plain["grad_norm"], strict=True)
        ),
        "weights": apart / way,
    }
    limits = {"loss": LOSS_APART, "grad_norm": NORM_APART, "weights": WEIGHTS_APART}
    return far, [
        f"{what} is {far[what]:.3g} apart" for what in far if not far[what] <= limits[what]
    ]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Sum of absolute differences."""
    return sum(float((one[n].double() - other[n].double()).abs().sum()) for n in one)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, default=2, help="layouts of more ranks are left out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--bin", type=int, default=16384, help="tokens, where rows lie in bins")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="dense:tp2,mixture:pp2,mixture:fsdp2: these")
    parser.add_argument("--no-steps", action="store_true", help="scores alone")
    parser.set_defaults(ranks=1, cp=1)  # every layout is given the same batch
    args = parser.parse_args()
    args.visible = ("", "")
    if args.device != "cpu":  # this process sees the first alone, and torch reads that once
        args.visible = tuple(os.environ.get(VISIBLE, "0,1").split(","))
        os.environ[VISIBLE] = args.visible[0]
    return args


def main() -> int:
    """See the module."""
    args = parse()
    told: dict[str, Any] = {"torch": torch.__version__, "megatron": version("megatron-core")}
    failures = []
    for kind, layouts in CASES.items():
        if args.only and f"{kind}:" not in args.only:
            continue
        folder = made(args, kind)
        told[f"{kind} scores"], bad = all_scores(args, folder, kind)
        failures += bad
        if args.no_steps:
            continue
        from safetensors.torch import load_file

        start = load_file(folder / "model.safetensors")
        plain, weights = run(args, folder, 1, None)
        told[f"{kind} {PLAIN}"] = plain
        start = {n: t for n, t in start.items() if n in weights}  # experts may lie one by one
        way = difference({n: weights[n] for n in start}, start)
        for name, (ranks, layout) in layouts.items():
            if ranks > args.gpus or not is_asked(args, kind, name):
                continue
            first, after = run(args, folder, ranks, layout)
            again, _ = run(args, folder, ranks, layout)
            first["equal_twice"] = again["weight_hash"] == first["weight_hash"]
            apart = difference({n: weights[n] for n in start}, {n: after[n] for n in start})
            first["apart"], bad = compared(first, plain, way, apart)
            if not first["equal_twice"]:
                bad.append("the same steps gave other bits")
            if first["hash_where_it_lies"] != first["weight_hash"]:
                bad.append("the hash of the shares is not that of the whole")
            failures += [f"{kind} {name}: {problem}" for problem in bad]
            told[f"{kind} {name}"] = first
            sys.stderr.write(json.dumps({f"{kind} {name}": first}) + "\n")
    told["failures"] = failures
    text = json.dumps(told, indent=1)
    sys.stdout.write(text + "\n")
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
