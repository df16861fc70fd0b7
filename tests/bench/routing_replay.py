"""What replaying recorded routes costs a step: the trainer's own step, with and without.

    python -m tests.bench.routing_replay --json tests/bench/results/routing_replay-DATE.json

One process, one model, the same samples: each step learns from answers whose routes are the model's
own, so both ways compute the same numbers through the same experts. Steps of both kinds take turns,
and the ratio is that of their medians. Packing is in it, the decoding of the record is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.schemas.events import ScoredTrajectory, Segment, SegmentScore, Tensor
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.model.routing import RouterCapture
from rlstreams.workers.trainer.learn.packing import Batch, pack
from rlstreams.workers.trainer.training.training import Training
from tests import factories
from tests.bench.hardware import hardware
from tests.gpu.model_rows import Shape
from tests.gpu.random_model import KINDS, write

DEMO = Path(__file__).resolve().parents[2] / "infra" / "examples" / "demo" / "model"
# As many layers and choices as make the routers a visible share; 25 M parameters.
KINDS["bench"] = Shape(
    layers=8,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    experts=64,
    expert_width=128,
    vocabulary=128,
)
PROMPT = 16


def samples(num: int, num_tokens: int) -> list[ScoredTrajectory]:
    """Random tokens, no routes yet."""
    draw = np.random.default_rng(0)
    found = []
    for index in range(num):
        ids = draw.integers(4, 100, num_tokens).astype(np.int32)
        logprobs = Tensor.of(np.full(num_tokens - PROMPT, -4.0, np.float32))
        segments = (
            Segment(author="prompt", token_ids=Tensor.of(ids[:PROMPT])),
            Segment(
                author="policy",
                token_ids=Tensor.of(ids[PROMPT:]),
                policy_version=0,
                behavior_logprobs=logprobs,
                finish_reason="stop",
            ),
        )
        score = SegmentScore(
            segment=1, anchor="sampled", policy_version=0, proximal_logprobs=logprobs
        )
        sample = factories.trajectory(group_id=str(index // 8), sample=index % 8, segments=segments)
        found.append(ScoredTrajectory(trajectory=sample, scores=(score,)))
    return found


def packed(made: Sequence[ScoredTrajectory], budget: int, *, is_replayed: bool) -> Batch:
    advantages = np.linspace(-1, 1, len(made), dtype=np.float32)
    return pack(
        made,
        advantages,
        [],
        policy_version=0,
        token_budget=budget,
        replay_routes=is_replayed,
    )


def routed(training: Training, made: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The samples with the routes that the model takes now."""
    found = []
    capture = RouterCapture(training.learner._model)
    for sample in made:
        with torch.no_grad():
            training.learner._score(packed([sample], 1 << 20, is_replayed=False).micro_batches[0])
        rows = capture.take(1)[0, :-1].to(torch.uint8).numpy()
        trajectory = replace(sample.trajectory, routed_experts=Tensor.of(rows))
        found.append(replace(sample, trajectory=trajectory))
    capture.close()
    return found


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step both ways."""
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-12), routing_replay=True)
    training = Training(folder, section, threads=1)
    made = routed(training, samples(args.samples, args.tokens))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    flips = 0.0
    for turn in range(2 * (args.rounds + 1)):
        is_replayed = turn % 2 == 1
        started_s = time.monotonic()
        batch = packed(made, args.budget, is_replayed=is_replayed)
        result = training.learner.step(batch)
        if turn >= 2:  # the first two are to warm up
            seconds[is_replayed].append(time.monotonic() - started_s)
        flips = max(flips, result.metrics.get("routing_flips", 0.0))
    live_s, replayed_s = (statistics.median(seconds[way]) for way in (False, True))
    pairs = sorted(b / a for a, b in zip(seconds[False], seconds[True], strict=True))
    return {
        "routers": str(training.routers),
        "tokens": args.samples * args.tokens,
        "live_s": live_s,
        "replayed_s": replayed_s,
        "ratio": replayed_s / live_s,
        "ratio_of_pairs": [pairs[0], pairs[-1]],
        "flips": flips,  # near ties, where the other samples of a batch decide
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    told: dict[str, Any] = {"hardware": hardware(), "threads": 1, "dtype": "float32"}
    told["demo"] = measured(DEMO, args)
    with tempfile.TemporaryDirectory() as folder:
        told["parameters"] = write("bench", Path(folder))
        told["8 layers, 64 experts, top 8"] = measured(Path(folder), args)
    print(json.dumps(told, indent=2))  # noqa: T201
    if args.json:
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
