"""The two-month bug in thirty seconds: an engine confirms a load, and goes on with its old weights.

python infra/examples/two_month_bug.py

Everything else is as in a run: versions are published, pulled and hashed, answers sampled and
scored under the version that they name. Nothing but the guard sees it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch

from rlstreams.schemas import PolicyPublished, ScoredTrajectory, Segment, Tensor, Trajectory
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.config.operation import GuardSection
from rlstreams.workers.engines.base import SampleRequest, Sampling
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.logprob.scoring import score_window
from rlstreams.workers.logprob.versions import plan_anchors
from rlstreams.workers.model.model import load_model, weights_of
from rlstreams.workers.policy.puller import Load
from rlstreams.workers.trainer.guard import MEAN, Guard, compared
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer

MODEL = Path(__file__).parent / "demo" / "model"
PROMPT = np.array([1, 8, 4, 9, 4, 7, 8], np.int32)
BREAKS_AT = 3  # the version that never arrives
UPDATE = 0.01  # of each weight, in place of a step


def trajectory(version: int, number: int, engine: BuiltinEngine, load_id: str) -> Trajectory:
    """One answer, as the rollout worker writes it."""

    async def answer() -> Segment:
        request = SampleRequest(
            sample_id=f"{version}/{number}/0", group_id=str(version), token_ids=PROMPT,
            prompt_tokens=len(PROMPT), sampling=Sampling(max_new_tokens=32), seed=number,
        )  # fmt: skip
        (one,) = [segment async for segment in engine.generate(request)]
        return Segment(
            author="policy", token_ids=Tensor.of(one.token_ids), load_id=load_id,
            policy_version=one.policy_version, behavior_logprobs=Tensor.of(one.logprobs),
        )  # fmt: skip

    return Trajectory(
        group_id=str(version), sample=number, attempt=0, group_size=16, purpose="train", row=0,
        dataset_epoch=0, replacement=0, reward=1.0, worker="rollout-0", engine=engine.name,
        segments=(Segment(author="prompt", token_ids=Tensor.of(PROMPT)), asyncio.run(answer())),
    )  # fmt: skip


def published(
    version: int, server: FileWeightServer, weights: dict[str, torch.Tensor]
) -> PolicyPublished:
    """A version that can be pulled, with its hash."""
    made = server.publish(version, weights)
    return PolicyPublished(
        model="demo", policy_version=version, weight_hash=made.weight_hash, epoch=1, instance="t",
        step=version, num_bytes=made.num_bytes, layout=made.layout, published_at_ms=0,
        endpoints=tuple(server.endpoints()), versions_served=tuple(server.versions()),
    )  # fmt: skip


def main() -> None:
    """Four versions: three that arrive, and one of which only the confirmation does."""
    engine, scorer, guard = BuiltinEngine(MODEL, slots=1), scorer_of(MODEL), Guard(GuardSection())
    weights, channel = weights_of(load_model(MODEL)), FileWeightChannel()
    with tempfile.TemporaryDirectory() as folder:
        server = FileWeightServer(Path(folder), keep=2)
        for version in range(BREAKS_AT + 1):
            weights = {n: w + UPDATE * torch.randn_like(w) for n, w in weights.items()}
            event = published(version, server, weights)
            scorer.pull(event, channel)
            if version == BREAKS_AT:
                engine._decoder.load = lambda _: None  # type: ignore[method-assign]
            pulled = asyncio.run(engine.pull(event, channel))
            print(f"version {version}: confirmed, hash {pulled.weight_hash[:12]}", end="; ")
            samples = [trajectory(version, n, engine, f"rollout-0/{version}") for n in range(16)]
            anchors = plan_anchors({version}, [version])
            loads = {version: Load(weight_hash=pulled.weight_hash, load_id=f"logprob-0/{version}")}
            scores = score_window(samples, anchors, loads, scorer)
            batch = [
                ScoredTrajectory(trajectory=one, scores=of_one)
                for one, of_one in zip(samples, scores, strict=True)
            ]
            mean = float(np.concatenate([part.distance_N for part in compared(batch)]).mean())
            print(f"{mean:.1e} nats a token between sampler and scorer")
            if told := guard.look(batch):
                print(f"\nthe run pauses: {told}")
            guard.learn({MEAN: mean})
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
