"""What a step of the trainer takes on one GPU and on several: seconds, memory, the same bits twice.

    python -m tests.gpu.parallel_train --shape 1.7b --ranks 2 --folder /tmp/1.7b --out result.json

A Qwen3 of a published shape with random weights, saved in `--folder` if it is not there; nothing is
downloaded. The trainer is the real one, rank 0 in this process. `--runs 2` does all steps twice,
in ranks started anew, and says whether the bits are equal. `--exhaust` then fills the last GPU from
outside, so that one rank alone runs out of memory in a step, frees it, and does that step again.
`--profile` takes one more step apart, by rank 0's kernels (`kernel_times.py`). `--regather` cuts
weights again after each layer, `--sum-each-pass` sums gradients in every pass, as where memory is
short: each shows what the other way saves.
`--device cpu` is for trying the script. Compare `loss` and `grad_norm` of files of other `--ranks`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.workers.compute.mesh import Mesh
from rlstreams.workers.compute.team import Team, team_of
from rlstreams.workers.config.trainer import (
    LayoutSection,
    LoraSection,
    OptimizerSection,
    TrainerSection,
)
from rlstreams.workers.model.cut import Cut, cut_evenly
from rlstreams.workers.model.device import claim_devices
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import size_bytes, weight_hash
from tests.gpu.kernel_times import traced
from tests.gpu.qwen3 import SHAPES, batch_of, model_of

SMALL_LENGTH = 256  # of the step before memory is made scarce
LEFT_GB = 1.0  # on the last GPU then


def made(args: argparse.Namespace) -> dict[str, float]:
    """The model's folder; seconds."""
    if (args.folder / "config.json").is_file():
        return {}
    started_s = time.monotonic()
    model = model_of(args)
    made_s = time.monotonic() - started_s
    model.save_pretrained(args.folder)
    del model
    if args.device != "cpu":
        torch.cuda.empty_cache()
    return {"made_s": round(made_s, 1), "saved_s": round(time.monotonic() - started_s - made_s, 1)}


def batch(args: argparse.Namespace, seed: int, length: int, *, in_bins: bool) -> Batch:
    """Rows as if a uniform policy had sampled them, which random weights almost are."""
    lengths = [length] * args.sequences
    alone = Cut(order=tuple(range(args.sequences)), sizes=(1,) * args.sequences)
    bins = cut_evenly(lengths, args.bin, args.ranks // args.cp, in_bins=True)
    bare = batch_of(args, lengths, bins if in_bins else alone, seed)
    logprob = -float(np.log(args.vocabulary))
    rows = []
    for row in bare.micro_batches:
        logprobs_BT = np.where(row.loss_mask_BT, np.float32(logprob), np.float32(0.0))
        rows.append(
            replace(row, behavior_logprobs_BT=logprobs_BT, proximal_logprobs_BT=logprobs_BT)
        )
    return replace(bare, micro_batches=tuple(rows))


def used_gb(device: str) -> list[float]:
    """Memory in use by GPU, as the driver sees it: what the ranks' allocators hold at most."""
    if device == "cpu":
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    return [round(int(line) * 2**20 / 1e9, 2) for line in told.split()]


def timed(device: str, work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and seconds."""
    started_s = time.monotonic()
    result = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return result, round(time.monotonic() - started_s, 3)


@contextmanager
def uncompiled() -> Iterator[None]:
    """A start in which rank 0's compiler fails: then no rank has compiled layers."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("compiled layers are not asked for")

    compiler, torch.compile = torch.compile, lambda *_, **__: refused
    try:
        yield
    finally:
        torch.compile = compiler


@contextmanager
def short_of_memory(args: argparse.Namespace) -> Iterator[None]:
    """A start in which rank 0 has no room to hold whole what is to be exchanged in each pass: then
    no rank holds it."""
    from rlstreams.workers.compute import fsdp2

    before = fsdp2.WEIGHTS_SHARE, fsdp2.GRADIENTS_SHARE
    if args.regather:
        fsdp2.WEIGHTS_SHARE = 0.0
    if args.sum_each_pass:
        fsdp2.GRADIENTS_SHARE = 0.0
    try:
        yield
    finally:
        fsdp2.WEIGHTS_SHARE, fsdp2.GRADIENTS_SHARE = before


@contextmanager
def heard() -> Iterator[list[float]]:
    """Seconds of each time that rank 0 gathers values of the host from all ranks: it waits there
    for the slower one."""
    seconds, own = [], Mesh.gathered

    def gathered(mesh: Mesh, value: Any) -> Any:
        started_s = time.monotonic()
        found = own(mesh, value)
        seconds.append(round(time.monotonic() - started_s, 5))
        return found

    Mesh.gathered = gathered  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Mesh.gathered = own  # type: ignore[method-assign]


def training_of(args: argparse.Namespace, gpus: tuple[str, ...], told: dict[str, Any]) -> Training:
    """The real one."""
    section = TrainerSection(
        ranks=args.ranks,
        layout=LayoutSection(cp=args.cp),
        micro_batch_tokens=args.bin,
        device=args.device,
        activation_checkpointing=args.checkpointing,
        redo=args.redo,
        optimizer=OptimizerSection(lr=1e-5, warmup_steps=0),
        lora=LoraSection(rank=args.lora),
    )
    team = team_of(gpus) or (Team(()) if args.cut else None)
    with uncompiled() if args.eager else nullcontext(), short_of_memory(args):
        training, told["started_s"] = timed(
            args.device,
            lambda: Training(
                args.folder, section, args.threads, args.device, args.dtype, team=team
            ),
        )
    told["why_padded"], told["why_eager"] = training.learner.why_padded, training.why_eager
    told["model_hash"] = training.model_hash
    told["backend"] = training.numerics.backend
    told["used_gb_at_start"] = used_gb(args.device)
    return training


def step_of(
    args: argparse.Namespace,
    training: Training,
    number: int,
    length: int,
    *,
    is_traced: bool = False,
) -> Any:
    """What one step says."""
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    rows = batch(args, number, length, in_bins=not training.learner.why_padded)
    kernels: dict[str, Any] = {}
    with heard() as heard_s:
        if is_traced:
            (result, kernels), seconds = timed(
                args.device, lambda: traced(lambda: training.learner.step(rows))
            )
        else:
            result, seconds = timed(args.device, lambda: training.learner.step(rows))
    told = {
        "seconds": seconds,
        "stages": {name: round(own, 4) for name, own in result.seconds.items()},
        "commanded_s": round(seconds - sum(result.seconds.values()), 4),
        "heard_s": heard_s,
        "tokens_per_s": round(args.sequences * length / seconds, 1),
        "loss": result.loss,
        "grad_norm": result.metrics["grad_norm"],
        "used_gb": used_gb(args.device),
    }
    if is_traced:
        told["kernels"] = kernels
    if args.device != "cpu":
        told["rank_0_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return told


def one_run(args: argparse.Namespace, gpus: tuple[str, ...], told: dict[str, Any]) -> None:
    """Steps from the folder's weights; what was reached is in `told` even if it then fails."""
    with closing(training_of(args, gpus, told)) as training:
        for number in range(args.steps):
            told[f"step_{number}"] = step_of(args, training, number, args.length)
        later = [told[f"step_{number}"]["seconds"] for number in range(1, args.steps)]
        if later:  # the first one compiles
            told["median_s"] = float(np.median(later))
            told["tokens_per_s"] = round(args.sequences * args.length / told["median_s"])
        if args.profile:
            told["traced"] = step_of(args, training, args.steps, args.length, is_traced=True)
        weights = training.learner.weights()
        told["weights_gb"] = round(size_bytes(weights) / 1e9, 3)
        _, told["gathered_s"] = timed(args.device, lambda: [None for _ in weights.values()])
        told["weight_hash"], told["hashed_s"] = timed(args.device, lambda: weight_hash(weights))
        if args.profile:
            _, told["hash_traced"] = traced(lambda: weight_hash(weights))


def exhausted(args: argparse.Namespace, gpus: tuple[str, ...]) -> dict[str, Any]:
    """A step that one rank alone has no memory for, and the same step with memory."""
    told: dict[str, Any] = {}
    with closing(training_of(args, gpus, told)) as training:
        step_of(args, training, 0, SMALL_LENGTH)
        with Ballast(gpus[-1]):
            told["used_gb_while_scarce"] = used_gb(args.device)
            started_s = time.monotonic()
            try:
                step_of(args, training, 1, args.length)
            except OutOfMemoryError as err:
                told["exhausted"] = str(err)[:300]
            else:
                raise RuntimeError(f"a step fits beside {LEFT_GB} GB: take a longer --length")
            told["recovered_s"] = round(time.monotonic() - started_s, 1)
        told["again"] = step_of(args, training, 1, args.length)
        told["hash_after_exhaustion"] = weight_hash(training.learner.weights())
    with closing(training_of(args, gpus, {})) as training:
        step_of(args, training, 0, SMALL_LENGTH)
        step_of(args, training, 1, args.length)
        told["hash_without"] = weight_hash(training.learner.weights())
    told["bit_equal"] = told["hash_after_exhaustion"] == told["hash_without"]
    return told


class Ballast:
    """Another process on a GPU that leaves `LEFT_GB` of it."""

    def __init__(self, gpu: str) -> None:
        code = (
            "import torch; free = torch.cuda.mem_get_info()[0]; "
            f"kept = torch.empty(int(free - {LEFT_GB}e9), dtype=torch.uint8, device='cuda'); "
            "print('full', flush=True); input()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        )  # fmt: skip

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"full\n":
            raise RuntimeError("the last GPU could not be filled")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=60)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """All runs."""
    told: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    told["versions"] = {name: version(name) for name in ("torch", "transformers")}
    wanted = "cpu" if args.device == "cpu" else "cuda:0"
    device, gpus = claim_devices("--device", wanted, args.ranks)
    args.device = device
    if device != "cpu":
        told["device"] = torch.cuda.get_device_name()
    told["folder"] = made(args)
    runs: list[dict[str, Any]] = []
    told["runs"] = runs
    for _ in range(args.runs):
        runs.append({})
        try:
            one_run(args, gpus, runs[-1])
        except (torch.OutOfMemoryError, OutOfMemoryError) as err:
            runs[-1]["out_of_memory"] = str(err)[:300]
    hashes = [run.get("weight_hash") for run in runs]
    if args.runs > 1:
        told["bit_equal"] = None not in hashes and len(set(hashes)) == 1
    if args.exhaust:
        told["exhaustion"] = exhausted(args, gpus)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each row")
    parser.add_argument("--folder", type=Path, required=True, help="of the model; made if absent")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=128, help="of these not learnt from")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--bin", type=int, default=16384, help="tokens of a bin, of one at least")
    parser.add_argument("--cut", action="store_true", help="one rank computes as several do")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    parser.add_argument("--redo", choices=("exact", "tolerate"), default="tolerate",
                        help="tolerate: fused attention kernels")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="take one more step apart")
    parser.add_argument("--regather", action="store_true", help="weights are gathered by layer")
    parser.add_argument("--sum-each-pass", action="store_true", help="gradients too, in each pass")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights learn")
    parser.add_argument("--runs", type=int, default=1, help="2: also whether bits are equal")
    parser.add_argument("--exhaust", action="store_true", help="needs GPUs, and 2 ranks or more")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = json.dumps(measured(args), indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
