"""How far the gradient of documents in one row is from that of padded rows, plain and compiled.

    python -m tests.gpu.document_gradients FOLDER [--tokens 8192] [--device cuda:0] [--out FILE]
    python -m tests.gpu.document_gradients --shared [--heads 64,128,256] [--out FILE]

One loss, sums of log-probs weighted by -1 and 1 as advantages are, over sequences of many lengths.
The reference is computed in float32 of padded rows. Of padded rows and of documents in bfloat16
the file has the norm of the gradient's difference by the reference's norm, of all weights together
and of the five worst tensors. `lengths` has the norm of the gradient for each length of row that
steps can have: by the layers as they are, and twice by compiled ones, with and without fused
kernels. `not_compiled` is what a trainer's start says of the model; empty: it compiles the layers.

With `--shared`, made-up models, by head's width and window: groups of eight with a prompt each, and
turns of a dialogue, in a row where each has all of its tokens (`whole`) and in one where they lie
once (`shared`), plain and compiled, beside padded rows in bfloat16. `relative` is the gradient's
difference from the reference's, `logprobs` the largest difference of a log-prob from the
reference's; `same_bits`: log-probs and gradients of a second pass are the first one's, to the bit.
It ends with 1 where bits differ, or one is further off than twice what padded rows are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstreams.workers.model import bins, one_order
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.cut import bin_sizes
from rlstreams.workers.model.documents import Documents, use_documents
from rlstreams.workers.model.layers import configure_compiler, marked_layers
from rlstreams.workers.model.model import configure_torch, load_model, right_padded
from rlstreams.workers.model.prefixes import Prefixes, Taken, Tokens
from rlstreams.workers.model.token_scores import TokenScorer
from tests import families
from tests.documents_on_cpu import take_documents_on_cpu

Gradients = dict[str, Tensor]
# Of made-up weights. At 0.5, as tests on CPUs in float32 have it, keys of a model that does not
# normalize them decide alone where attention lies, and bfloat16 decides otherwise than float32.
INITIAL = 0.05


def sequences_of(num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Lengths up to a sixth of a row, beyond a window of 512 in a row of 8,192; a rest is left."""
    rng, longest = np.random.default_rng(seed), num_tokens // 6
    lengths: list[int] = []
    while num_tokens - sum(lengths) > longest:
        lengths.append(int(rng.integers(8, longest)))
    return [[2, *rng.integers(vocab_size // 4, vocab_size, n - 1).tolist()] for n in lengths]


class Case:
    """A model, and one loss of it computed in several ways."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        tokens: int,
        seed: int,
        sequences: list[list[int]] | None = None,
    ) -> None:
        self.model: Any = load_model(folder, dtype).to(device).requires_grad_(True)
        self.scorer = TokenScorer(self.model, attention_of(self.model).right_padded)
        self.device, self.tokens = device, tokens
        self.sequences = sequences or sequences_of(tokens, self.scorer.vocab_size, seed)
        self.logprobs_N = torch.zeros(0)  # of the last pass
        weights = np.random.default_rng(seed + 1).choice([-1.0, 1.0], len(self.sequences))
        each = [w for w, s in zip(weights, self.sequences, strict=True) for _ in s[1:]]
        self.weights_N = torch.tensor(each, device=device)

    def padded(self) -> tuple[float, Gradients]:
        """A row a sequence, two at a time."""
        self.model.zero_grad(set_to_none=True)
        total, at, parts = 0.0, 0, []
        for first in range(0, len(self.sequences), 2):
            some = self.sequences[first : first + 2]
            ids_BT, real_BT = (t.to(self.device) for t in right_padded(some, 0))
            chosen_BT = real_BT.clone()
            chosen_BT[:, 0] = False
            num = int(chosen_BT.sum())
            weights_n = self.weights_N[at : at + num]
            found = self.scorer(ids_BT, real_BT, chosen_BT, torch.ones_like(weights_n))
            total += self._backward(found.logprobs_N, weights_n)
            parts.append(found.logprobs_N.detach())
            at += num
        self.logprobs_N = torch.cat(parts)
        return total, self._gradients()

    def documents(
        self, num_tokens: int = 0, taken: Sequence[Taken] | None = None
    ) -> tuple[float, Gradients]:
        """One row of documents, of so many tokens (0: `tokens`), of which they share some."""
        self.model.zero_grad(set_to_none=True)
        lengths = [len(sequence) for sequence in self.sequences]
        row = Documents.of(lengths, num_tokens or self.tokens, taken)
        flat = torch.tensor([token for sequence in self.sequences for token in sequence])
        places = torch.from_numpy(row.places(len(flat)))
        ids_1T = torch.zeros(1, num_tokens or self.tokens, dtype=torch.int64)
        ids_1T[0, places] = flat
        is_chosen = [at > 0 for sequence in self.sequences for at in range(len(sequence))]
        chosen_N = places[torch.tensor(is_chosen)].to(self.device)
        ones_N = torch.ones_like(self.weights_N)
        found = self.scorer(ids_1T.to(self.device), None, chosen_N, ones_N, row.to(self.device))
        self.logprobs_N = found.logprobs_N.detach()
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
        layers = marked_layers(case.model)
        plain = [layer.forward for layer in layers]
        for name, fuses in (("fused", True), ("not fused", False)):
            configure_compiler(fuses)
            for layer, forward in zip(layers, plain, strict=True):
                layer.forward = torch.compile(forward, dynamic=False, fullgraph=True)
            norms[name] = [norm_of(case), norm_of(case)]
        found[str(size)] = norms
        say(f"rows of {size}", norms)
    return found


def shared_cases(args: argparse.Namespace) -> dict[str, Any]:
    """By head's width and window, see the module."""
    found: dict[str, Any] = {"device": args.device, "torch": torch.__version__}
    if args.device != "cpu":
        found["device"] = torch.cuda.get_device_name()
    for width in args.heads.split(","):
        for name, window in (("Qwen3ForCausalLM", None), ("MistralForCausalLM", 100)):
            told = found[f"{width} {window or 'all'}"] = shared_case(args, name, int(width), window)
            say(f"heads of {width}, window {window}", told)
    found["is_right"] = all(one["is_right"] for one in found.values() if isinstance(one, dict))
    return found


def shared_case(
    args: argparse.Namespace, name: str, width: int, window: int | None
) -> dict[str, Any]:
    """One model in float32 of padded rows, and in bfloat16 of both kinds of rows."""
    sequences = related(args.shared_tokens, args.seed)
    rows = Prefixes([Tokens(np.array(sequence)) for sequence in sequences])
    taken = rows.taken(range(len(sequences)))
    whole = sum(map(len, sequences))
    once = whole - sum(own.tokens for own in taken)
    told: dict[str, Any] = {"sequences": len(sequences), "tokens": whole, "computed": once}
    changes = {
        "head_dim": width, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 8192,
        "sliding_window": window, "initializer_range": INITIAL,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        families.make(name, Path(folder), **changes)
        given = (args.device, -(-whole // 128) * 128, args.seed, sequences)
        case = Case(Path(folder), "float32", *given)
        _, reference = case.padded()
        expected_N = case.logprobs_N
        case = Case(Path(folder), "bfloat16", *given)
    _, gradients = case.padded()
    told["padded"] = compared(case, gradients, expected_N, reference)
    use_documents(case.model)
    size = -(-once // 128) * 128
    ways = {"whole": (0, None), "shared": (size, taken)}
    for compiles in (False, True)[: 1 + (args.device != "cpu")]:
        if compiles:
            told["not_compiled"] = bins.compile_for_bins(case.scorer, size, shares=True)
        for way, row in ways.items():
            _, gradients = case.documents(*row)
            logprobs_N, found = case.logprobs_N, compared(case, gradients, expected_N, reference)
            _, again = case.documents(*row)
            same = torch.equal(logprobs_N, case.logprobs_N)
            same = same and all(torch.equal(g, again[n]) for n, g in gradients.items())
            told[f"{way}{' compiled' * compiles}"] = found | {"same_bits": same}
    ways_of = {name: one for name, one in told.items() if isinstance(one, dict)}
    told["is_right"] = all(
        one.get("same_bits", True)
        and all(one[figure] <= 2 * told["padded"][figure] for figure in ("logprobs", "relative"))
        for one in ways_of.values()
    )
    return told


def compared(
    case: Case, gradients: Gradients, expected_N: Tensor, reference: Gradients
) -> dict[str, Any]:
    """How far the last pass of a case is from the reference."""
    return {
        "logprobs": float((case.logprobs_N - expected_N).abs().max()),
        "relative": difference(gradients, reference)["relative"],
    }


def related(num_tokens: int, seed: int) -> list[list[int]]:
    """Two groups of eight, and six turns of a dialogue; of that many tokens or so."""
    random = np.random.default_rng(seed)
    unit = num_tokens // 40

    def drawn(longest: int) -> list[int]:
        num = int(random.integers(longest // 2, longest))
        return random.integers(3, families.VOCABULARY, num).tolist()

    found: list[list[int]] = []
    for _ in range(2):
        prompt = drawn(unit)
        found += [prompt + drawn(2 * unit) for _ in range(8)]
    turn = drawn(unit)
    for _ in range(6):
        turn = turn + drawn(unit)
        found.append(turn)
    return [found[index] for index in random.permutation(len(found))]


def norm_of(case: Case) -> float:
    """Of the whole gradient of documents."""
    return float(np.sqrt(sum(float(g.norm()) ** 2 for g in case.documents()[1].values())))


def say(name: str, value: Any) -> None:
    """A line of what was found."""
    sys.stdout.write(f"{name}: {json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--heads", default="64,128,256")
    parser.add_argument("--shared-tokens", type=int, default=6_000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure_torch(8, args.device, fused=True)
    if args.device == "cpu":
        take_documents_on_cpu(setattr)
    if not args.shared and args.folder is None:
        parser.error("FOLDER or --shared")
    told = shared_cases(args) if args.shared else measured(args)
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if not told.get("is_right", True):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
