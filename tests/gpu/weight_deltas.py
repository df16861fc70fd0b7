"""Versions of the real trainer in the weight store: bytes, seconds to write and to apply.

    python -m tests.gpu.weight_deltas --out result.json    # 1.7B, on one H100

A `Learner` (AdamW, float32 masters, learning rate `--lr`) trains a Qwen3 of a published shape with
random weights on made-up samples; the versions of `--steps` steps go through the store into a
temporary folder. A version's own hash is computed on its device. `apply_s` is a reader's that holds
the version before: reading, decoding and the hash on `THREADS` of the CPU (`read_one_behind_s`),
then the copy to its device. A pull over NCCL of the same weights is `tests.gpu.weight_transfer`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from rlstreams.workers.model.cut import cut_bins, cut_rows
from rlstreams.workers.model.model import configure_torch
from rlstreams.workers.weights.layout import weight_hash
from tests.bench.hardware import hardware
from tests.bench.weight_store import Weights, stored
from tests.gpu.qwen3 import SHAPES, batch_of, model_of, on_policy
from tests.gpu.result import kept
from tests.gpu.train_step import learner_of, lengths_of, timed

THREADS = 8  # a container has fewer cores than its machine says: more threads wait for each other


def trained(args: argparse.Namespace, told: dict[str, Any]) -> tuple[list[Weights], list[str]]:
    """Version 0 and one for each step, in host memory, and their hashes."""
    model = model_of(args)
    learner = learner_of(args, model, "bins", told)
    lengths = lengths_of(args, "lognormal")
    cut = (cut_rows if learner.why_padded else cut_bins)(lengths, args.bin)
    versions, hashes = [], []

    def keep() -> None:
        weights = learner.weights()
        hashes.append(weight_hash(weights))
        versions.append({name: tensor.to("cpu", copy=True) for name, tensor in weights.items()})

    keep()
    for step in range(args.steps):
        batch = on_policy(learner, batch_of(args, lengths, cut, seed=2 + step))
        result, seconds = timed(lambda batch=batch: learner.step(batch))
        keep()
        norm = result.metrics["grad_norm"]
        sys.stdout.write(f"step {step + 1}: {seconds:.2f} s, gradient's norm {norm:.3g}\n")
        sys.stdout.flush()
    return versions, hashes


def copied_s(weights: Weights, device: str) -> float:
    """Seconds to bring them from host memory to where they are used."""
    there = {name: torch.empty_like(tensor, device=device) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            there[name].copy_(tensor)

    return min(timed(copy)[1] for _ in range(2))


def main() -> None:
    """Train, store, read, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1.7b", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--bin", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1, help="of each reading; the best counts")
    parser.add_argument("--limit-s", type=float, default=220.0, help="for all of it")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(checkpointing=False, group=0)
    args = parser.parse_args()
    configure_torch(min(THREADS, os.cpu_count() or 1), args.device, fused=True, in_one_order=True)
    device = args.device if args.device == "cpu" else torch.cuda.get_device_name()
    with kept(args.out, args.limit_s) as told:
        told |= {"hardware": hardware(), "device": device, "torch": torch.__version__}
        told |= {
            name: getattr(args, name) for name in ("shape", "lr", "steps", "samples", "length")
        }
        versions, hashes = trained(args, told)
        told["num_weights"] = sum(tensor.numel() for tensor in versions[0].values())
        told["to_device_s"] = round(copied_s(versions[-1], args.device), 4)
        stored(versions, args.rounds, hashes, told)
        told["apply_s"] = round(told["read_one_behind_s"] + told["to_device_s"], 4)


if __name__ == "__main__":
    main()
