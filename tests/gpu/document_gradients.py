"""How far the gradient of documents in one row is from that of padded rows, plain and compiled.

    python -m tests.gpu.document_gradients FOLDER [--tokens 8192] [--device cuda:0] [--out FILE]

One loss, sums of log-probs weighted by -1 and 1 as advantages are, over sequences of many lengths.
The reference is computed in float32 of padded rows. Of padded rows and of documents in bfloat16
the file has the norm of the gradient's difference by the reference's norm, of all weights together
and of the five worst tensors. `lengths` has the norm of the gradient for each length of row that
steps can have: by the layers as they are, and twice by compiled ones, with and without fused
kernels. `not_compiled` is what a trainer's start says of the model; empty: it compiles the layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlstreams.workers.model import bins, one_order
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.cut import bin_sizes
from rlstreams.workers.model.documents import Documents, use_documents
from rlstreams.workers.model.model import configure_torch, load_model, right_padded
from rlstreams.workers.model.token_scores import TokenScorer
from tests.documents_on_cpu import take_documents_on_cpu

Gradients = dict[str, Tensor]


def sequences_of(num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Lengths up to a sixth of a row, beyond a window of 512 in a row of 8,192; a rest is left."""
    rng, longest = np.random.default_rng(seed), num_tokens // 6
    lengths: list[int] = []
    while num_tokens - sum(lengths) > longest:
        lengths.append(int(rng.integers(8, longest)))
    return [[2, *rng.integers(vocab_size // 4, vocab_size, n - 1).tolist()] for n in lengths]


class Case:
    """A model, and one loss of it computed in several ways."""

    def __init__(self, folder: Path, dtype: str, device: str, tokens: int, seed: int) -> None:
        self.model: Any = load_model(folder, dtype).to(device).requires_grad_(True)
        self.scorer = TokenScorer(self.model, attention_of(self.model).right_padded)
        self.device, self.tokens = device, tokens
        self.sequences = sequences_of(tokens, self.scorer.vocab_size, seed)
        weights = np.random.default_rng(seed + 1).choice([-1.0, 1.0], len(self.sequences))
        each = [w for w, s in zip(weights, self.sequences, strict=True) for _ in s[1:]]
        self.weights_N = torch.tensor(each, device=device)

    def padded(self) -> tuple[float, Gradients]:
        """A row a sequence, two at a time."""
        self.model.zero_grad(set_to_none=True)
        total, at = 0.0, 0
        for first in range(0, len(self.sequences), 2):
            some = self.sequences[first : first + 2]
            ids_BT, real_BT = (t.to(self.device) for t in right_padded(some, 0))
            chosen_BT = real_BT.clone()
            chosen_BT[:, 0] = False
            num = int(chosen_BT.sum())
            weights_n = self.weights_N[at : at + num]
            found = self.scorer(ids_BT, real_BT, chosen_BT, torch.ones_like(weights_n))
            total += self._backward(found.logprobs_N, weights_n)
            at += num
        return total, self._gradients()

    def documents(self) -> tuple[float, Gradients]:
        """One row of documents."""
        self.model.zero_grad(set_to_none=True)
        flat = [token for sequence in self.sequences for token in sequence]
        ids_1T = torch.tensor([flat + [0] * (self.tokens - len(flat))], device=self.device)
        is_chosen = [at > 0 for sequence in self.sequences for at in range(len(sequence))]
        chosen_N = torch.tensor(is_chosen).nonzero()[:, 0].to(self.device)
        lengths = [len(sequence) for sequence in self.sequences]
        row = Documents.of(lengths, self.tokens).to(self.device)
        ones_N = torch.ones_like(self.weights_N)
        found = self.scorer(ids_1T, None, chosen_N, ones_N, row)
        total = self._backward(found.logprobs_N, self.weights_N)
        return total, self._gradients()

    def _backward(self, logprobs_n: Tensor, weights_n: Tensor) -> float:
        loss = -(logprobs_n * weights_n).sum() / len(self.weights_N)
        one_order.backward(loss)
        return float(loss.detach())

    def _gradients(self) -> Gradients:
        named = self.model.named_parameters()
        return {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}


def difference(found: Gradients, reference: Gradients) -> dict[str, Any]:
    """Relative norms of all tensors together, and of the worst."""
    off = {n: float((found[n] - g).norm()) for n, g in reference.items()}
    norm = {n: float(g.norm()) for n, g in reference.items()}
    inner = sum(float((found[n] * g).sum()) for n, g in reference.items())
    own = float(np.sqrt(sum(float(found[n].norm()) ** 2 for n in reference)))
    whole = float(np.sqrt(sum(value**2 for value in norm.values())))
    by_tensor = {n: off[n] / max(norm[n], 1e-30) for n in reference}
    worst = sorted(by_tensor, key=lambda name: -by_tensor[name])[:5]
    return {
        "relative": float(np.sqrt(sum(value**2 for value in off.values()))) / whole,
        "cosine": inner / (own * whole),
        "norm": own,
        "norm_of_reference": whole,
        "worst": {name: round(by_tensor[name], 4) for name in worst},
    }


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """All cases."""
    given = (args.device, args.tokens, args.seed)
    case = Case(args.folder, "float32", *given)
    loss, reference = case.padded()
    told: dict[str, Any] = {"reference_loss": loss, "sequences": len(case.sequences)}
    say("reference", {"loss": loss, "norm": difference(reference, reference)["norm"]})
    del case
    case = Case(args.folder, "bfloat16", *given)

    def add(name: str, loss: float, found: Gradients) -> None:
        told[name] = {"loss": loss, **difference(found, reference)}
        say(name, told[name])

    add("padded", *case.padded())
    use_documents(case.model)
    add("documents", *case.documents())
    told["lengths"] = by_length(args)
    told["not_compiled"] = bins.compile_for_bins(case.scorer, args.tokens)
    told["fuses"] = torch._inductor.config.max_fusion_size > 1
    say("not compiled", told["not_compiled"])
    add("as_chosen", *case.documents())
    return told


def by_length(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Norms of the gradient, by length of row and way of computing; compiled whatever comes out."""
    found: dict[str, dict[str, list[float]]] = {}
    for size in bin_sizes(args.tokens):
        case = Case(args.folder, "bfloat16", args.device, size, args.seed)
        use_documents(case.model)
        norms = {"plain": [norm_of(case)]}
        layers = [m for m in case.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        plain = [layer.forward for layer in layers]
        for name, fuses in (("fused", True), ("not fused", False)):
            bins._configure(fuses)
            for layer, forward in zip(layers, plain, strict=True):
                layer.forward = torch.compile(forward, dynamic=False, fullgraph=True)
            norms[name] = [norm_of(case), norm_of(case)]
        found[str(size)] = norms
        say(f"rows of {size}", norms)
    return found


def norm_of(case: Case) -> float:
    """Of the whole gradient of documents."""
    return float(np.sqrt(sum(float(g.norm()) ** 2 for g in case.documents()[1].values())))


def say(name: str, value: Any) -> None:
    """A line of what was found."""
    sys.stdout.write(f"{name}: {json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure_torch(8, args.device, fused=True)
    if args.device == "cpu":
        take_documents_on_cpu(setattr)
    told = measured(args)
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
