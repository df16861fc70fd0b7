"""What roles compute on a GPU, against the same on the CPU: scores, samples, and a step, twice.

    python -m tests.gpu.roles_on_gpu --device cuda --out result.json

Half a minute, the demo model: run it before `whole_run`, for it names what is wrong sooner.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.engines.base import SampleRequest, TokenSequence
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.engines.builtin_scorer import BuiltinScorer
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.device import claim_device
from rlstreams.workers.trainer.learn.packing import pack
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests.contract.engine_rigs import collect, request, tokens
from tests.factories import scored, trajectory
from tests.gpu.weight_transfer import hardware

MODEL = Path(__file__).resolve().parents[2] / "infra" / "examples" / "demo" / "model"
SEQUENCES = ([11, 105, 12, 107, 23], [9, 105, 8, 105, 7, 107, 17, 108, 24], [5, 107, 5])


def scores(device: str) -> list[Any]:
    """Log-probs and entropy of a padded batch."""
    scorer = BuiltinScorer(MODEL, device=device)
    channel = FolderChannel(MODEL)
    scorer.pull(channel.published, channel)
    sequences = [TokenSequence(token_ids=np.array(ids, np.int32)) for ids in SEQUENCES]
    found = scorer.score(sequences, channel.published.policy_version, 1.0)
    return [(one.logprobs, one.entropy) for one in found]


def greedy(sample_id: str, ids: Sequence[int]) -> SampleRequest:
    """The likeliest tokens."""
    return request(sample_id, token_ids=np.array(ids, np.int32), temperature=0.0)


def samples(device: str) -> list[list[int]]:
    """The likeliest tokens after each prompt."""

    async def run() -> list[list[int]]:
        engine = BuiltinEngine(MODEL, slots=4, device=device)
        channel = FolderChannel(MODEL)
        await engine.start()
        await engine.pull(channel.published, channel)
        found = [
            tokens(await collect(engine, greedy(f"{n}/0/0", ids)))
            for n, ids in enumerate(SEQUENCES)
        ]
        await engine.close()
        return found

    return asyncio.run(run())


def step(device: str) -> tuple[str, float, float]:
    """Hash, loss and gradient norm of two steps on made-up samples."""
    training = Training(MODEL, TrainerSection(), threads=1, device=device)
    made = [scored(trajectory(sample=n)) for n in range(4)]
    advantages = np.array([1.0, 0.5, -0.2, 0.3], np.float32)
    batch = pack(made, advantages, [], policy_version=2, token_budget=4096)
    for _ in range(2):
        result = training.learner.step(batch)
    hashed = weight_hash(training.learner.weights())
    return hashed, result.loss, result.metrics["grad_norm"]


def compared(device: str) -> dict[str, Any]:
    """Each part by itself: one that fails does not hide the others."""
    told: dict[str, Any] = {}

    def part(name: str, work: Callable[[], object]) -> None:
        started_s = time.monotonic()
        try:
            told[name] = work()
        except Exception:  # noqa: BLE001  (told, and the next part is tried)
            told[name] = {"failed": traceback.format_exc()[-2000:]}
        told[f"{name}_s"] = time.monotonic() - started_s

    def score_gap() -> float:
        pairs = zip(scores("cpu"), scores(device), strict=True)
        return max(float(np.abs(a[k] - b[k]).max()) for a, b in pairs for k in (0, 1))

    def same_steps() -> dict[str, Any]:
        first, again, plain = step(device), step(device), step("cpu")
        return {"bit_equal": first == again, "on_device": first, "on_cpu": plain}

    part("score_gap", score_gap)
    part("steps", same_steps)
    part("samples_equal", lambda: samples("cpu") == samples(device))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = claim_device("--device", args.device)
    result = {"hardware": hardware(), "device": device} | compared(device)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    if "failed" in text:
        sys.exit(1)


if __name__ == "__main__":
    main()
