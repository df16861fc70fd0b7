"""The built-in scorer on one device: tokens a second packed and compiled, beside what it was.

    python -m tests.gpu.score_throughput --out result.json                # Qwen3-1.7B, an H200
    python -m tests.gpu.score_throughput --device cpu --tiny
    python -m tests.gpu.score_throughput --cases ranks --ranks 2 --kind 30b-a3b   # two GPUs

A folder with random weights is written first. `padded`: rows, layers as they are; `bins`: packed;
`bins-compiled`: what the log-prob worker does; `pulling`: the same while versions are pulled and
dropped beside it; `plain`: compiled layers and head over the same bins, laid out on the device
before the clock starts; `ranks`: one replica of `--ranks` processes. Each scores `--samples` of
`--length` tokens, or of lognormal lengths, several times under two versions; each version must give
the same bits every time.
FLOPs: 2 a matmul weight and token, causal attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines import builtin_scorer
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.builtin_scorer import BuiltinScorer
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.cut import cut_bins
from rlstreams.workers.model.device import claim_devices
from rlstreams.workers.model.documents import Documents, use_documents
from rlstreams.workers.model.model import configure_torch, load_model
from rlstreams.workers.trainer.parallel.rank_scorer import RanksScorer
from rlstreams.workers.trainer.parallel.team import Team
from rlstreams.workers.weights.channel import Pulled
from tests.documents_on_cpu import take_documents_on_cpu
from tests.gpu.model_rows import SHAPES
from tests.gpu.random_model import KINDS, write
from tests.gpu.train_step import PEAK, lengths_of

CASES = ("padded", "bins", "bins-compiled", "pulling", "plain")
NOT_ASKED = "not asked for"


def synchronized(args: argparse.Namespace) -> float:
    """Seconds, with nothing left to do."""
    if args.device != "cpu":
        torch.cuda.synchronize()
    return time.monotonic()


def sequences_of(args: argparse.Namespace, lengths: list[int]) -> list[TokenSequence]:
    """Made-up samples."""
    random = np.random.default_rng(2)
    size = KINDS[args.kind].vocabulary
    return [TokenSequence(token_ids=random.integers(0, size, n).astype(np.int32)) for n in lengths]


def scorer_of(args: argparse.Namespace, case: str) -> BuiltinScorer | RanksScorer:
    """As the log-prob worker makes it, or with a part left out."""
    if case == "ranks":
        device, gpus = claim_devices("--device", args.device, args.ranks)
        return RanksScorer(
            Team(gpus, owner="scorer"), args.folder, token_budget=args.bin, threads=4,
            device=device, dtype="bfloat16",
        )  # fmt: skip
    kept = builtin_scorer.take_documents, builtin_scorer.compile_for_bins
    if case == "padded":
        builtin_scorer.take_documents = lambda *_: NOT_ASKED
    if case == "bins":
        builtin_scorer.compile_for_bins = lambda *_, **__: NOT_ASKED
    try:
        return BuiltinScorer(
            args.folder, token_budget=args.bin, threads=4, device=args.device, dtype="bfloat16"
        )
    finally:
        builtin_scorer.take_documents, builtin_scorer.compile_for_bins = kept


class Beside:
    """Pulls and drops a version again and again, in a thread."""

    def __init__(self, pull: Callable[[int], Pulled], scorer: BuiltinScorer | RanksScorer) -> None:
        self._pull, self._scorer = pull, scorer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.seconds.append(self._pull(9).seconds)
            self._scorer.drop(9)


def ours(
    args: argparse.Namespace, case: str, lengths: list[int], channel: FolderChannel, told: Any
) -> None:
    """Score under two versions in turn, and compare the bits of each one's calls."""
    started_s = time.monotonic()
    scorer = scorer_of(args, case)
    told |= {
        "start_s": round(time.monotonic() - started_s, 1),
        "why_padded": scorer.why_padded,
        "why_eager": scorer.why_eager,
    }

    def pull(version: int) -> Pulled:
        published: PolicyPublished = replace(channel.published, policy_version=version)
        return scorer.pull(published, channel)

    told["pull_s"] = [round(pull(version).seconds, 2) for version in (0, 1)]
    sequences = sequences_of(args, lengths)
    seconds: list[float] = []
    bits: list[bytes] = []

    def score(version: int) -> None:
        began_s = synchronized(args)
        found = scorer.score(sequences, version, 1.0)
        seconds.append(synchronized(args) - began_s)
        told["logprob"] = float(np.mean([one.logprobs[1:].mean() for one in found]))
        bits.append(b"".join(s.logprobs.tobytes() + s.entropy.tobytes() for s in found))

    if case == "pulling":
        with Beside(pull, scorer) as beside:
            for number in range(args.repeats + 1):
                score(number % 2)
        told["pulls_beside"] = len(beside.seconds)
        told["pull_beside_s"] = round(float(np.median(beside.seconds)), 2)
    else:
        for number in range(args.repeats + 1):
            score(number % 2)
    told["first_s"] = round(seconds[0], 3)
    if isinstance(scorer, RanksScorer):
        scorer.close()
    told["same_bits"] = len(set(bits)) == 1  # both versions have the same weights
    told |= figures(args, lengths, float(np.median(seconds[1:])))
    assert told["same_bits"], "the same call gave other bits"


def plain(args: argparse.Namespace, lengths: list[int], told: Any) -> None:
    """A loop over bins that lie on the device."""
    model: Any = load_model(args.folder, "bfloat16").to(args.device)
    use_documents(model)
    body, matrix = model.model, model.lm_head.weight
    for layer in body.layers:
        layer.compile(dynamic=False, fullgraph=True)

    def chunk(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden, matrix).float()
        logprobs = torch.log_softmax(logits, -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, ids[:, None])[:, 0], entropy

    score_chunk = torch.compile(chunk)
    cut = cut_bins(lengths, args.bin)
    sequences = sequences_of(args, lengths)
    rows = []
    for own, size in zip(cut.members, cut.bins, strict=True):
        flat = np.concatenate([sequences[index].token_ids for index in own]).astype(np.int64)
        ids = torch.zeros(1, size, dtype=torch.int64)
        ids[0, : len(flat)] = torch.from_numpy(flat)
        documents = Documents.of([lengths[index] for index in own], size)
        rows.append((ids.to(args.device), documents.to(args.device)))

    @torch.inference_mode()
    def score() -> None:
        for ids, documents in rows:
            hidden = body(input_ids=ids, use_cache=False, **documents.inputs()).last_hidden_state[0]
            for at in range(0, ids.shape[1] - 1, 4096):
                score_chunk(
                    hidden[at : at + 4096][: ids.shape[1] - 1 - at], ids[0, at + 1 :][:4096]
                )

    seconds = []
    for _ in range(args.repeats + 1):
        began_s = synchronized(args)
        score()
        seconds.append(synchronized(args) - began_s)
    told["first_s"] = round(seconds[0], 3)
    told |= figures(args, lengths, float(np.median(seconds[1:])))


def figures(args: argparse.Namespace, lengths: list[int], seconds: float) -> dict[str, Any]:
    """Rates of one window."""
    shape, total = KINDS[args.kind], sum(lengths)
    by_layer = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    by_layer += 3 * shape.hidden * shape.expert_width
    flops = 2.0 * total * (by_layer * shape.layers + shape.vocabulary * shape.hidden)
    attended = sum(n * (n + 1) / 2 for n in lengths)
    flops += 4.0 * shape.layers * shape.heads * shape.head_dim * attended
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device != "cpu" else 0.0
    return {
        "tokens": total,
        "score_s": round(seconds, 3),
        "tokens_per_s": round(total / seconds),
        "mfu": round(flops / seconds / PEAK, 4),
        "padding": round(sum(cut_bins(lengths, args.bin).bins) / total, 4),
        "peak_gb": round(peak, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kind", choices=sorted(KINDS | SHAPES), default="qwen3-1.7b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=1224)
    parser.add_argument("--bin", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--lengths", default="constant,lognormal")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(prompt=200)
    args = parser.parse_args()
    KINDS.update(SHAPES)
    if args.tiny:
        args.kind = "tiny"
        args.samples, args.length, args.bin, args.prompt = 12, 60, 256, 8
    configure_torch(4, args.device, fused=True)
    if args.device == "cpu":
        take_documents_on_cpu(setattr)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        write(args.kind, args.folder)
        path = args.folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"max_position_embeddings": 40960}), encoding="utf-8")
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Each case by itself; one that fails must not cost the others."""
    device = args.device if args.device == "cpu" else torch.cuda.get_device_name()
    told: dict[str, Any] = {"device": device, "torch": torch.__version__, "cases": {}}
    told |= {name: getattr(args, name) for name in ("kind", "samples", "length", "bin")}
    channel = FolderChannel(args.folder, "bfloat16")
    failed = False
    for kind in args.lengths.split(","):
        lengths = lengths_of(args, kind)
        for case in args.cases.split(","):
            gc.collect()
            torch._dynamo.reset()
            if args.device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            found = told["cases"][f"{kind} {case}"] = {}
            try:
                if case == "plain":
                    plain(args, lengths, found)
                else:
                    ours(args, case, lengths, channel, found)
            except Exception as err:
                failed = True
                found["error"] = f"{type(err).__name__}: {err}"[:1000]
                if os.environ.get("RAISE"):
                    raise
            sys.stdout.write(f"{kind} {case} {json.dumps(found)}\n")
            sys.stdout.flush()
            if args.out:
                args.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
