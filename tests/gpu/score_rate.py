"""Tokens per second of a log-prob worker on one GPU, beside a bare forward loop over its batches.

    python -m tests.gpu.score_rate --folder /tmp/models --out result.json     # 1.7B, an H200
    python -m tests.gpu.score_rate --folder /tmp/models --device cpu          # tries the script

A Qwen3 of a published shape with random weights; samples of lognormal lengths (mean 1k, at most
8k). `worker`: the role's own loop on a log in memory, from encoded trajectories to their committed
scores. `bare`: the same compiled model over the bins that the worker made, laid out on the GPU
before. Both by turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.schemas.events import DeadLetter, ScoredTrajectory, Segment, Tensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS, POLICY_VERSIONS, SCORED, TRAJECTORIES
from rlstreams.workers.bootstrap.parts import make_scorers
from rlstreams.workers.compute.forward import cut_of, parts_of, prefixes_of
from rlstreams.workers.compute.score import MeshScorer
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.model import load_model, weights_of
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests import factories
from tests.documents_on_cpu import take_documents_on_cpu
from tests.gpu.whole_run import hardware
from tests.gpu.workload import write_folder
from tests.unit.roles.stand import Stand

PROMPT = 64
MOST = 8192


def samples(args: argparse.Namespace, seed: int) -> list[Any]:
    """Trajectories of version 0."""
    random = np.random.default_rng(seed)
    drawn = random.lognormal(np.log(args.mean) - 0.32, 0.8, args.samples)
    made = []
    for number, length in enumerate(drawn.clip(PROMPT + 16, 8 * args.mean).astype(int)):
        ids = random.integers(4, args.vocabulary, length).astype(np.int32)
        answer = Segment(
            author="policy",
            token_ids=Tensor.of(ids[PROMPT:]),
            policy_version=0,
            behavior_logprobs=Tensor.of(np.full(length - PROMPT, -1.0, np.float32)),
            finish_reason="length",
        )
        prompt = Segment(author="prompt", token_ids=Tensor.of(ids[:PROMPT]))
        changes = {
            "group_id": str(1_000_000 * seed + number),
            "sample": 0,
            "segments": (prompt, answer),
        }
        made.append(factories.trajectory(**changes))
    return made


def scored_by(worker: StageLoop, stand: Stand, trajectories: Sequence[Any]) -> float:
    """Seconds until the log holds the scores of all."""
    bus = stand.bus()
    before = sum(bus.ends(SCORED.name).values())
    stand.send(*(outgoing(TRAJECTORIES, one) for one in trajectories))
    started_s = time.monotonic()
    while sum(bus.ends(SCORED.name).values()) < before + len(trajectories):
        worker.tick()
        if time.monotonic() > started_s + 300:
            why = {letter.detail for letter in stand.read(DEAD_LETTERS.name, DeadLetter)}
            raise SystemExit(f"dead letters: {why}; of others nothing came for 300 s")
    return time.monotonic() - started_s


def bins_of(scored: Sequence[ScoredTrajectory], budget: int, device: str) -> list[tuple[Any, ...]]:
    """What the worker's windows came to, as inputs of the model."""
    windows: defaultdict[int, list[tuple[int, TokenSequence]]] = defaultdict(list)
    for event in scored:
        ids = np.concatenate([s.token_ids.numpy() for s in event.trajectory.segments])
        sequence = TokenSequence(token_ids=ids, group_id=event.trajectory.group_id)
        windows[event.window].append((event.window_place, sequence))
    made = []
    for _, window in sorted(windows.items()):
        sequences = [sequence for _, sequence in sorted(window, key=lambda item: item[0])]
        prefixes = prefixes_of(sequences)
        cut = cut_of(sequences, budget, in_bins=True, prefixes=prefixes)
        for own, num_tokens, taken in parts_of(cut, sequences, prefixes):
            lengths = [len(sequence.token_ids) for sequence in own]
            documents = Documents.of(lengths, num_tokens, taken)
            ids_T = np.zeros(num_tokens, np.int64)
            places = documents.places(sum(lengths))
            ids_T[places] = np.concatenate([sequence.token_ids for sequence in own])
            chosen, _ = documents.scored(np.concatenate([np.arange(n) > 0 for n in lengths]))
            made.append((
                torch.from_numpy(ids_T[None]).to(device), None,
                torch.from_numpy(chosen).to(device), torch.ones(len(chosen), device=device),
                documents.to(device),
            ))  # fmt: skip
    return made


def bare_s(scorer: MeshScorer, bins: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of a forward over each bin, nothing else."""
    with scorer._holding(0, scorer._held[0]), torch.inference_mode():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started_s = time.monotonic()
        for one in bins:
            scorer._shards.root(*one)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic() - started_s


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both, by turns."""
    folder = write_folder(args.folder / f"score-{args.shape}", args.shape, args.vocabulary)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MOST}))
    stand = Stand(
        args.folder, model__path=folder, model__dtype=args.dtype, logprob__device=args.device,
        logprob__token_budget=args.budget, logprob__commit_interval_s=0.1, logprob__window_s=0.1,
    )  # fmt: skip
    context = stand.context("logprob")
    scorer, _ = make_scorers(context.config)
    if not isinstance(scorer, MeshScorer) or scorer.why_padded:
        raise SystemExit(f"not packed: {getattr(scorer, 'why_padded', scorer)}")
    weights = weights_of(load_model(folder, args.dtype))
    server = FileWeightServer(args.folder / "weights", keep=1)
    manifest = server.publish(0, weights)
    published = factories.policy_published(
        0, weight_hash=manifest.weight_hash, layout=manifest.layout, versions_served=(0,),
        endpoints=tuple(server.endpoints()), epoch=1,
    )  # fmt: skip
    stand.send(outgoing(POLICY_VERSIONS, published))
    worker = make_worker(context, context.bus, scorer, FileWeightChannel())
    first_s = scored_by(worker, stand, samples(args, 0))  # pulls, compiles, warms up
    known = len(stand.read(SCORED.name, ScoredTrajectory))
    worker_s, bare, padding, ratio = [], [], [], []
    for seed in range(1, args.rounds + 1):
        own = samples(args, seed)
        num_tokens = sum(len(s.token_ids.numpy()) for one in own for s in one.segments)
        worker_s.append(num_tokens / scored_by(worker, stand, own))
        scored = [
            s
            for s in stand.read(SCORED.name, ScoredTrajectory)
            if int(s.trajectory.group_id) // 1_000_000 == seed
        ]
        known += len(scored)
        bins = bins_of(scored, args.budget, args.device)
        bare.append(num_tokens / bare_s(scorer, bins))
        padding.append(sum(one[0].numel() for one in bins) / num_tokens)
        ratio.append(worker_s[-1] / bare[-1])
    worker.close()
    return {
        "shape": args.shape, "samples": args.samples, "why_eager": scorer.why_eager,
        "first_s": first_s, "worker_tokens_s": worker_s, "bare_tokens_s": bare,
        "computed_per_token": padding, "ratios": ratio, "ratio": statistics.median(ratio),
        "scored": known,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the worker has at least 0.9 of the bare rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default="1.7b")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--mean", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.device == "cpu":
        take_documents_on_cpu(setattr)
        args.shape, args.dtype = "tiny", "float32"
        args.vocabulary, args.budget, args.samples, args.mean, args.rounds = 512, 1024, 24, 128, 2
    args.folder.mkdir(parents=True, exist_ok=True)
    found = {"hardware": hardware()} | measure(args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0 if found["ratio"] >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
