"""A model folder of billions of parameters with random weights, under the demo's tokenizer.

    python -m tests.gpu.random_model dense folder

Written in bfloat16. The vocabulary is the demo's 128 tokens, so all of its weight is in the layers.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlstreams.workers.weights.link.mapping import each_expert
from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import Shape, dense_rows, trainer_rows

DEMO = Path(__file__).resolve().parents[2] / "infra" / "examples" / "demo" / "model"
STD = 0.02
KINDS = {
    # The layers of Qwen3-1.7B: 1.4 billion parameters.
    "dense": Shape(
        layers=28,
        hidden=2048,
        heads=16,
        kv_heads=8,
        head_dim=128,
        experts=0,
        expert_width=6144,
        vocabulary=128,
    ),
    # 1.7 billion parameters, of which a token sees 0.3 billion.
    "moe": Shape(
        layers=16,
        hidden=1024,
        heads=16,
        kv_heads=4,
        head_dim=64,
        experts=64,
        expert_width=512,
        vocabulary=128,
    ),
}
KINDS["qwen3-1.7b"] = replace(KINDS["dense"], vocabulary=151_936)
KINDS["tiny"] = replace(KINDS["dense"], layers=2, hidden=256, heads=4, kv_heads=2, expert_width=512)


def write(kind: str, folder: Path, seed: int = 0) -> int:
    """A whole folder; returns the number of parameters."""
    shape = KINDS[kind]
    write_model(folder, shape)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, _, size in trainer_rows(shape) if shape.experts else dense_rows(shape):
        tensor = torch.ones(size, dtype=torch.bfloat16)
        if not name.endswith("norm.weight"):
            tensor.normal_(std=STD, generator=generator)
        tensors[name] = tensor
    loose = {name: t.contiguous() for name, t in each_expert(tensors.items(), tensors)}
    save_file(loose, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["pad_token_id"] = 0
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    started_s = time.monotonic()
    number = write(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.write(f"{number:,} parameters in {time.monotonic() - started_s:.0f} s\n")


if __name__ == "__main__":
    main()
