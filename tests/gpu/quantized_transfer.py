"""Weight pulls into a vLLM server that quantises to FP8: not in place, by its loader, packed anew.

    python -m tests.gpu.quantized_transfer --out result.json
    python -m tests.gpu.quantized_transfer --backend gloo --python PYTHON --quantization "" -- ...

A server that was started with dummy weights pulls a version as bfloat16. Its log-probs must be
those of a fresh server that quantised the same version when it read it from a model folder. Then
another version and the first one again: what a loader keeps of an earlier version would show.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import save_file

from rlstreams.workers.weights.link.experts import each_expert
from rlstreams.workers.weights.report_listener import ServerPullError, describe
from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import SHAPES
from tests.gpu.model_server import PYTHON, Vllm
from tests.gpu.served_transfer import IDS, Trainer
from tests.gpu.weight_transfer import hardware

FIRST, OTHER = 1, 2


def start(args: argparse.Namespace, model: Path, folder: Path, load: str, port: int) -> Vllm:
    """A server that quantises what it loads; on GPU 1."""
    arguments = ["--load-format", load, *args.arguments]
    arguments += ["--quantization", args.quantization] if args.quantization else []
    arguments += [] if args.backend == "gloo" else ["--gpu-memory-utilization", "0.3"]
    return Vllm(
        model,
        folder,
        port=port,
        gpu="" if args.backend == "gloo" else "1",
        python=args.python,
        backend="",
        arguments=arguments,
    )


def pulled(args: argparse.Namespace, trainer: Trainer, model: Path, folder: Path) -> dict[str, Any]:
    """Pull by pull into a server with dummy weights; also writes the first version as a folder."""
    with start(args, model, folder, "dummy", 18821) as engine:
        assert isinstance(engine, Vllm)
        engine.prepare()
        with trainer.listener.open(describe(), kind="describe", ranks=1) as pending:
            engine.pause()
            engine.update(pending.text)
            engine.resume()
            parameters = pending.reports()[0]["parameters"]
        told: dict[str, Any] = {"dtypes": dict(Counter(dtype for _, dtype, _ in parameters))}
        published = trainer.publish(FIRST)
        whole = {n: t.cpu().contiguous() for n, t in each_expert(trainer.weights.items())}
        save_file(whole, model / "model.safetensors", {"format": "pt"})
        try:
            trainer.pull(engine, published, "in_place")
        except ServerPullError as err:
            told["in_place"] = {"kind": err.kind, "touched": err.touched, "error": str(err)}
        told["pulls"], told["logprobs"] = [], []
        for version in (FIRST, OTHER, FIRST):
            event = trainer.publish(version) if version != FIRST or told["pulls"] else published
            told["pulls"].append(trainer.pull(engine, event, "auto"))
            told["logprobs"].append(engine.logprobs(IDS))
        told["tail"] = engine.tail()[-1500:]
    return told


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both servers, one after the other."""
    folder = Path(tempfile.mkdtemp())
    model = write_model(folder / "model", SHAPES[args.model])
    trainer = Trainer(args)
    try:
        told = pulled(args, trainer, model, folder)
    finally:
        trainer.server.close()
        trainer.listener.close()
    with start(args, model, folder, "auto", 18822) as engine:
        assert isinstance(engine, Vllm)
        fresh = engine.logprobs(IDS)
    first, other, again = told.pop("logprobs")
    told["logprobs"] = {
        "bit_equal_to_a_fresh_server": first == fresh,
        "max_difference": max(abs(a - b) for a, b in zip(first, fresh, strict=True)),
        "the_first_version_again": first == again,
        "another_version_differs": first != other,
        "first_three": [first[:3], fresh[:3]],
    }
    return told


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--quantization", default="fp8", help="of the server; empty: none")
    parser.add_argument("--python", default=PYTHON, help="the interpreter that has the server")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="after --: more arguments of the server")
    return parser.parse_args(namespace=argparse.Namespace(place="device"))


def main() -> None:
    args = parse()
    result = {"hardware": hardware(), "torch": torch.__version__, "model": args.model}
    result |= {"quantization": args.quantization, "arguments": args.arguments} | measure(args)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
