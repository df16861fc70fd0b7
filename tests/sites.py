"""An engine and a scorer of one model, with versions that both pull: what the guard looks at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rlstreams.schemas.events import PolicyPublished, ScoredTrajectory, Segment, Trajectory
from rlstreams.workers.engines.base import (
    Engine,
    GeneratedSegment,
    Int32s,
    SampleRequest,
    Sampling,
    Scorer,
    sampled_by,
)
from rlstreams.workers.logprob.scoring import score_window
from rlstreams.workers.logprob.versions import plan_anchors, versions_of
from rlstreams.workers.policy.puller import Load
from rlstreams.workers.trainer.guard import MEAN, Compared, Guard, compared
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests import factories
from tests.contract.engine_rigs import announced
from tests.unit.trainer.trainer_builders import floats, ids

Weights = Mapping[str, torch.Tensor]
Said = list[tuple[int, list[GeneratedSegment]]]  # by number of the sample
WORKER = "rollout-0"
STEP = 0.01  # of each weight: an update of the demo's size


@dataclass
class Site:
    """Samples of one version after the other, each scored under the version that it names."""

    engine: Engine
    scorer: Scorer
    weights: Weights
    folder: Path  # of versions
    prompts: Sequence[Int32s]  # of the samples of a step
    sampling: Sampling
    version: int = -1
    channel: FileWeightChannel = field(default_factory=FileWeightChannel)

    def __post_init__(self) -> None:
        self.server = FileWeightServer(self.folder, keep=4)

    def next_version(self) -> PolicyPublished:
        """One more: the scorer holds it, and the one before; the engine is to pull it."""
        self.version += 1
        draw = torch.Generator().manual_seed(self.version)
        self.weights = {
            name: tensor + STEP * torch.randn(tensor.shape, generator=draw)
            for name, tensor in self.weights.items()
        }
        published = announced(self.server, self.server.publish(self.version, self.weights))
        self.scorer.pull(published, self.channel)
        self.scorer.drop(self.version - 2)
        return published

    async def pulled(self) -> None:
        """A version, in the engine too, as it says."""
        await self.engine.pull(self.next_version(), self.channel)

    async def step(self) -> list[ScoredTrajectory]:
        """A version, and samples that it sampled and scored."""
        await self.pulled()
        return self.scored([self.trajectory(n, said) for n, said in await self.sampled()])

    async def sampled(self) -> Said:
        """The samples of the newest version."""

        async def one(number: int) -> tuple[int, list[GeneratedSegment]]:
            prompt = self.prompts[number]
            request = SampleRequest(
                sample_id=f"{self.version}/{number}/0", group_id=str(self.version),
                token_ids=prompt, prompt_tokens=len(prompt), sampling=self.sampling, seed=number,
            )  # fmt: skip
            return number, [segment async for segment in self.engine.generate(request)]

        return list(await asyncio.gather(*map(one, range(len(self.prompts)))))

    def trajectory(
        self, number: int, said: list[GeneratedSegment], prompt: Int32s | None = None
    ) -> Trajectory:
        """As the rollout worker writes it."""
        own = tuple(
            Segment(
                author="policy", token_ids=ids(one.token_ids), policy_version=one.policy_version,
                load_id=f"{WORKER}/i/{one.policy_version}",
                behavior_logprobs=floats(one.logprobs),
            )
            for one in said
            if len(one.token_ids)
        )  # fmt: skip
        given = Segment(
            author="prompt", token_ids=ids(self.prompts[number] if prompt is None else prompt)
        )
        return factories.trajectory(
            group_id=str(self.version), sample=number, segments=(given, *own), worker=WORKER,
            engine=sampled_by(self.engine.name, said),
        )  # fmt: skip

    def scored(self, samples: list[Trajectory]) -> list[ScoredTrajectory]:
        """As the log-prob worker scores them."""
        sampled = set[int]().union(*map(versions_of, samples))
        anchors = plan_anchors(sampled, self.scorer.versions)
        loads = {version: Load(weight_hash="", load_id="") for version in sampled}
        window = score_window(samples, anchors, loads, self.scorer)
        return [
            ScoredTrajectory(trajectory=one, scores=scores)
            for one, scores in zip(samples, window, strict=True)
        ]


def mean_of(batch: Sequence[ScoredTrajectory]) -> float:
    """Of the distance over its tokens, nats: what a step's metrics have as MEAN."""
    return float(np.concatenate([part.distance_N for part in compared(batch)]).mean())


async def sound_step(site: Site, guard: Guard) -> float:
    """A step of which the guard says nothing, and which it learns; its mean, nats."""
    batch = await site.step()
    assert guard.look(batch) == ""
    guard.learn({MEAN: (mean := mean_of(batch))})
    return mean


def assert_named(told: str, batch: Sequence[ScoredTrajectory], engine: str, version: int) -> None:
    """Engine or server, version and load, and the worst sample with its worst token."""
    load = f"version {version}, load {WORKER}/i/{version}"
    assert told.startswith(
        f"{WORKER} ({engine}) under {load} does not sample with the weights that are scored: "
    ), told
    worst = worst_of(batch)
    at = int(worst.distance_N.argmax())
    assert f"Worst sample {worst.sample}: " in told
    token = f"token {worst.ids_N[at]}: {worst.sampler_N[at]:.3f} and {worst.scorer_N[at]:.3f}"
    assert token in told


def worst_of(batch: Sequence[ScoredTrajectory]) -> Compared:
    """The sample that is farthest off."""
    return max(compared(batch), key=lambda part: part.distance_N.mean())
