"""Seconds of a trainer's start by stage, of one start behind the other: what later ones find kept.

    python -m tests.gpu.trainer_start --shape 1.7b --out result.json
    python -m tests.gpu.trainer_start --shape tiny --device cpu --dtype float32 --starts 1  # CPU

Each start is a process of its own that does what the role does before its claim: it imports, loads
a model of random weights, checks it, tries documents and compiled layers on its device, and hashes
the weights. `imports` is what a forked role finds done. The compiler's cache folder is new, so the
first start finds it empty.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rlstreams.up.supervisor.spawner import PRELOAD
from tests.gpu.whole_run import hardware

START_S = 500.0
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def one_start(args: argparse.Namespace) -> dict[str, float]:
    """Stages of a start in this process, in seconds."""
    began_s, found = time.perf_counter(), dict[str, float]()
    import torch

    from rlstreams.workers.config.load import load
    from rlstreams.workers.engines import selfcheck
    from rlstreams.workers.model import bins
    from rlstreams.workers.model.device import claim_devices
    from rlstreams.workers.trainer.training import training

    import_module(PRELOAD)
    found["imports"] = time.perf_counter() - began_s

    def timed(module: Any, name: str) -> None:
        before: Callable[..., Any] = getattr(module, name)

        def measured(*words: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return before(*words, **named)
            finally:
                if args.device != "cpu":
                    torch.cuda.synchronize()
                found[name] = found.get(name, 0.0) + time.perf_counter() - start_s

        setattr(module, name, measured)

    timed(selfcheck, "load_model")
    timed(selfcheck, "check_scoring")
    timed(bins, "take_documents")
    timed(bins, "why_unshared")
    timed(bins, "compile_for_bins")
    timed(training, "weight_hash")
    section = load([], [f"trainer.micro_batch_tokens={args.bin}"]).trainer
    device, _ = claim_devices("trainer.device", args.device, 1)
    made = training.Training(args.folder, section, 1, device, args.dtype)
    found["all"] = time.perf_counter() - began_s
    sys.stderr.write(json.dumps(made.slower) + "\n")
    made.close()
    return {name: round(seconds, 2) for name, seconds in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """All starts, or the one that `--folder` asks for."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1.7b", help="of tests/gpu/qwen3.py")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bin", type=int, default=8192, help="trainer.micro_batch_tokens")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of a model: one start, in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    if args.folder:
        sys.stdout.write(json.dumps(one_start(args)))
        return 0
    from tests.gpu.workload import write_folder

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write_folder(folder, args.shape, args.vocabulary)
        command = [sys.executable, "-m", "tests.gpu.trainer_start", *words, "--folder", str(folder)]
        starts = [
            json.loads(
                subprocess.run(
                    command, check=True, timeout=START_S, stdout=subprocess.PIPE, text=True,
                    env=os.environ | {CACHE: f"{made}/compiled", "OMP_NUM_THREADS": "1"},
                ).stdout.splitlines()[-1]
            )
            for _ in range(args.starts)
        ]  # fmt: skip
    found = {"hardware": hardware(), "shape": args.shape, "bin": args.bin, "starts_s": starts}
    text = json.dumps(found, indent=1) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
