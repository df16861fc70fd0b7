"""Rows that two GPUs share beside rows that one GPU holds: tokens/s, FLOP/s, memory, the same bits.

    python -m tests.gpu.shared_rows --shape 0.6b --folder /tmp/0.6b --out result.json

Each case is a `tests.gpu.parallel_train` of its own:

- `one`: one card, rows of one document, of the longest of `--lengths` that it has memory for.
- `shared`: two ranks, rows of `--length`, layers compiled; all steps twice, in ranks started anew.
- `eager`: the same rows, layers as they are; if memory lacks, the longest of `--lengths`.
- `one_documents`, `shared_documents`: documents of `--document` tokens in those rows. Their tokens
  cost the same in both, so `ratio_of_tokens` compares like with like.

A longer document costs more attention a token, so rows of one document are compared by the FLOP/s
of a GPU (`rlstreams/workers/trainer/training/step_cost.py` counts them). A rate is the median of
the steps after the first. `--only` runs some cases: a machine may be lent for less than all take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstreams.workers.trainer.training.step_cost import ModelFlops
from tests.gpu.qwen3 import SHAPES, model_of

CASES = ("one", "shared", "eager", "one_documents", "shared_documents")
LIMIT_S = 540.0  # of one process


def ran(
    args: argparse.Namespace, *, ranks: int, row: int, document: int, more: Sequence[str]
) -> Any:
    """What `parallel_train` says of rows of that many tokens, and rates beside it."""
    sequences = max(1, args.tokens // document)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        command = [
            sys.executable, "-m", "tests.gpu.parallel_train", "--shape", args.shape,
            "--ranks", str(ranks), "--cp", str(ranks), "--folder", str(args.folder),
            "--vocabulary", str(args.vocabulary), "--length", str(document),
            "--prompt", str(args.prompt), "--sequences", str(sequences), "--bin", str(row),
            "--steps", str(args.steps), "--dtype", args.dtype, "--redo", args.redo,
            "--threads", str(args.threads), "--device", args.device, "--out", str(out), *more,
        ]  # fmt: skip
        if args.checkpointing:
            command.append("--checkpointing")
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return {"row": row, "failed": done.stderr[-1500:]}
        told = json.loads(out.read_text(encoding="utf-8"))
    del told["arguments"]
    found: dict[str, Any] = {"ranks": ranks, "row": row, "document": document, **told}
    if any("out_of_memory" in run for run in told["runs"]):
        return found
    flops = args.flops.step([(document, 0)] * sequences, sequences * (document - args.prompt))
    later = [run[f"step_{n}"]["seconds"] for run in told["runs"] for n in range(1, args.steps)]
    seconds = statistics.median(later)
    found["tokens_per_s_and_gpu"] = round(sequences * document / seconds / ranks, 1)
    found["tflops_per_gpu"] = round(flops / seconds / ranks / 1e12, 6)
    return found


def longest(args: argparse.Namespace, **case: Any) -> Any:
    """The first of `--lengths` for which there is memory, and those before it for which not."""
    lacking = []
    for row in args.lengths:
        found = ran(args, row=row, **({"document": row} | case))
        if "tflops_per_gpu" in found or "failed" in found:
            return found | {"no_memory_for_rows_of": lacking}
        lacking.append(row)
    return {"no_memory_for_rows_of": lacking}


def measured(args: argparse.Namespace, told: dict[str, Any]) -> None:
    """All cases that are asked for; what was reached is in `told`."""
    row, document = args.length, args.document

    def case(name: str, found: Any) -> Any:
        told[name] = found
        write(args, told)
        return found

    if "one" in args.only:
        case("one", longest(args, ranks=1, more=[]))
    if "shared" in args.only:
        more = ["--runs", "2"]
        case("shared", ran(args, ranks=2, row=row, document=row, more=more))
    if "eager" in args.only:
        found = case("eager", ran(args, ranks=2, row=row, document=row, more=["--eager"]))
        if "tflops_per_gpu" not in found and "failed" not in found:
            case("eager", longest(args, ranks=2, more=["--eager"]))
    if "one_documents" in args.only:
        held = told.get("one", {}).get("row")
        lengths = [held] if held else args.lengths
        cut = argparse.Namespace(**vars(args) | {"lengths": lengths})
        case("one_documents", longest(cut, ranks=1, document=document, more=[]))
    if "shared_documents" in args.only:
        case("shared_documents", ran(args, ranks=2, row=row, document=document, more=[]))
    for name, pair, unit in (
        ("ratio_of_flops", ("one", "shared"), "tflops_per_gpu"),
        ("eager_to_compiled", ("shared", "eager"), "tflops_per_gpu"),
        ("ratio_of_tokens", ("one_documents", "shared_documents"), "tokens_per_s_and_gpu"),
    ):
        rates = [told.get(case, {}).get(unit) for case in pair]
        if None not in rates:
            told[name] = round(rates[1] / rates[0], 3)
    write(args, told)


def write(args: argparse.Namespace, told: dict[str, Any]) -> None:
    """Write down what was reached."""
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--folder", type=Path, required=True, help="of the model; made if absent")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a shared row")
    parser.add_argument("--lengths", type=int, nargs="+", help="of one card's rows, falling",
                        default=[65_536, 49_152, 40_960, 32_768, 24_576, 16_384])  # fmt: skip
    parser.add_argument("--document", type=int, default=8_192)
    parser.add_argument("--tokens", type=int, default=131_072, help="of a step, about")
    parser.add_argument("--prompt", type=int, default=128, help="of a document, not learnt from")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--redo", choices=("exact", "tolerate"), default="exact")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="has what was reached, even if it then fails")
    args = parser.parse_args()
    told: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    args.flops = ModelFlops.of(
        model_of(argparse.Namespace(**vars(args) | {"device": "meta"})), has_adapters=False
    )
    measured(args, told)
    sys.stdout.write(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
