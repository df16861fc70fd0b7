"""The work that two trainers are compared on: a Qwen3 of a published shape, prompts of one length.

Weights are random and no token ends an answer, so each answer has exactly the length asked for and
both trainers sample and train on as many tokens. The tokenizer has a word for each id of the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.gpu.model_folder import write_model
from tests.gpu.model_rows import Shape, dense_rows
from tests.gpu.qwen3 import SHAPES

STD = 0.02
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def write_folder(folder: Path, shape: str, vocabulary: int, seed: int = 0) -> Path:
    """Model, tokenizer and configuration; tied embeddings where the published model ties them."""
    layers, hidden, heads, width, is_tied = SHAPES[shape]
    sizes = Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=min(8, heads // 2),
        head_dim=128,
        experts=0,
        expert_width=width,
        vocabulary=vocabulary,
    )
    write_model(folder, sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, _, size in dense_rows(sizes):
        if is_tied and name == "lm_head.weight":
            continue
        tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
        if not name.endswith("norm.weight"):
            tensor.normal_(std=STD, generator=generator)
        tensors[name] = tensor.cpu()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("bos_token_id", "eos_token_id", "num_experts_per_tok"):  # dense, without end
        del config[name]
    config |= {"pad_token_id": 0, "tie_word_embeddings": is_tied}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_tokenizer(folder, vocabulary)
    return folder


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = dict.fromkeys(SPECIAL) | {f"w{n}": None for n in range(len(SPECIAL), vocabulary)}
    core = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(core), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
        "model_max_length": 16384,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_prompts(file: Path, *, rows: int, tokens: int, vocabulary: int) -> Path:
    """`rows` prompts of `tokens` random words."""
    random = np.random.default_rng(0)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(rows):
            words = random.integers(len(SPECIAL), vocabulary, tokens)
            text = " ".join(f"w{number}" for number in words)
            lines.write(json.dumps({"prompt": text, "answer": "1"}) + "\n")
    return file
