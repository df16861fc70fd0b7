"""What training cost elsewhere: perplexity of plain text, and the divergence from the first model.

    python -m infra.examples.pretrained.forgotten runs/pretrained-base/{gemma,model} runs/after

The text is Python's own language reference (`pydoc_data.topics`), which every installation has. A
window has 512 tokens; its perplexity is exp of the mean negative log-likelihood, the divergence the
mean of KL(first || model) over its places, nats.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 512


def windows(folder: Path, number: int) -> tuple[torch.Tensor, str]:
    """[number, WINDOW] tokens of the text, and the text's SHA-256."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    body = WINDOW - len(first)
    ids = tokenizer.encode(text[: 40 * number * WINDOW], add_special_tokens=False)
    rows = [first + ids[at * body : (at + 1) * body] for at in range(number)]
    return torch.tensor(rows), hashlib.sha256(text.encode()).hexdigest()


@torch.inference_mode()
def measured(folders: Sequence[Path], number: int, device: str) -> list[dict[str, Any]]:
    """Figures of each model, the first one's divergence from itself being 0."""
    rows, digest = windows(folders[0], number)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for folder in folders
    ]
    likelihood, divergence = [0.0] * len(models), [0.0] * len(models)
    for row_T in rows:
        ids_1T = row_T[None].to(device)
        scores_TV: list[torch.Tensor] = [
            model(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1) for model in models
        ]
        for at, own_TV in enumerate(scores_TV):
            likelihood[at] += own_TV.gather(1, ids_1T[0, 1:, None]).mean().item()
            apart_T = (scores_TV[0].exp() * (scores_TV[0] - own_TV)).sum(-1)
            divergence[at] += apart_T.mean().item()
    return [
        {
            "model": str(folder), "windows": number, "text_sha256": digest,
            "perplexity": round(math.exp(-likely / number), 4), "kl": round(apart / number, 5),
        }
        for folder, likely, apart in zip(folders, likelihood, divergence, strict=True)
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = measured(args.models, args.windows, args.device)
    for own in found:
        print(f"{own['perplexity']:8.2f}  KL {own['kl']:.4f}  {own['model']}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
