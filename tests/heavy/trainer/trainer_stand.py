"""A trainer on an in-memory log, what it reads, and what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    ScoredTrajectory,
    Segment,
    SegmentScore,
    StepCompleted,
    Tensor,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, STEPS
from rlstreams.workers.bootstrap.weights import weight_store
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop.context import Context
from rlstreams.workers.trainer.training.training import Trained, Training
from rlstreams.workers.trainer.worker import TrainerWorker
from rlstreams.workers.weights.channel import WeightServer
from rlstreams.workers.weights.file import FileWeightServer
from rlstreams.workers.weights.layout import weight_hash
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.roles.stand import tick_until

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"


def make_config(folder: Path, **overrides: object) -> RunConfig:
    values = {
        "run.dir": str(folder),
        "trainer.steps": 3,
        "trainer.groups_per_step": 1,
        "trainer.checkpoint_every": 100,
        "deadlines.lease_s": 0.3,
        "prompts.group_size": 2,
        "guard.action": "off",  # log-probs of these samples are made up
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    return load([EXAMPLE], [f"{key}={value}" for key, value in values.items()])


def make_log() -> MemoryLog:
    return made_log("demo")


def make_trainer(
    log: MemoryLog,
    config: RunConfig,
    instance: str = "one",
    *,
    takeover: bool = False,
    bus: Bus | None = None,
    hardware: type[Training] = Training,
    server: WeightServer | None = None,
    beat: Callable[[], None] = lambda: None,
    claims_after: int | None = None,
) -> TrainerWorker:
    bus = bus or MemoryBus(log, "demo")
    context = Context(
        config=config, bus=bus, role="trainer", ordinal=0, instance=instance, takeover=takeover,
        beat=beat, claims_after=claims_after,
    )  # fmt: skip
    training = hardware(Path(config.model.path), config.trainer, threads=1)
    server = server or FileWeightServer(context.folder / "weights", 4)
    return TrainerWorker(context, context.bus, training, server, weight_store(context))


class OtherHardware(Training):
    """Rounds otherwise: after each step one weight is one bit off."""

    def __init__(self, folder: Path, section: TrainerSection, threads: int) -> None:
        super().__init__(folder, section, threads)
        self.numerics = replace(self.numerics, cpu_capability="abacus")

    def train(self, *args: Any) -> Trained:
        trained = super().train(*args)
        weight = next(iter(self.learner.weights().values())).view(-1)
        weight[0] = torch.nextafter(weight[0], weight[0] + 1)
        self.weight_hash = weight_hash(self.learner.weights())
        return replace(trained, weight_hash=self.weight_hash)


def bury(trainer: TrainerWorker) -> None:
    """What is left of a killed process: nothing that runs, an open transaction perhaps."""
    trainer._compute_thread.shutdown()


def scored(group: int, sample: int, version: int, **changes: object) -> ScoredTrajectory:
    draw = np.random.default_rng((group, sample))
    tokens = draw.integers(4, 100, 5).astype(np.int32)
    logprobs = Tensor.of(np.full(5, -1.0, np.float32))
    values = {
        "group_id": str(group),
        "sample": sample,
        "group_size": 2,
        "row": group,
        "reward": float(sample),
        "segments": (
            Segment(author="prompt", token_ids=Tensor.of(np.array([1, 5, 6], np.int32))),
            Segment(
                author="policy",
                token_ids=Tensor.of(tokens),
                policy_version=version,
                behavior_logprobs=logprobs,
                finish_reason="stop",
            ),
        ),
    } | changes
    score = SegmentScore(
        segment=1, anchor="sampled", policy_version=version, proximal_logprobs=logprobs
    )
    return ScoredTrajectory(trajectory=factories.trajectory(**values), scores=(score,))


def send(log: MemoryLog, *events: Event | Outgoing) -> None:
    records = [
        event
        if isinstance(event, Outgoing)
        else outgoing(DEAD_LETTERS if isinstance(event, DeadLetter) else SCORED, event)
        for event in events
    ]
    MemoryBus(log, "demo").producer("logprob.0").commit(records)


def read(log: MemoryLog, topic: str) -> list[Event]:
    bus = MemoryBus(log, "demo")
    return [decoded(raw).event for raw in bus.reader(bus.beginnings(topic)).poll(10_000, 0.0)]


def steps(log: MemoryLog) -> list[StepCompleted]:
    return [event for event in read(log, STEPS.name) if isinstance(event, StepCompleted)]


def run_steps(log: MemoryLog, trainer: TrainerWorker, num: int) -> None:
    tick_until(trainer, lambda: len(steps(log)) >= num)


def train(log: MemoryLog, trainer: TrainerWorker, num: int) -> None:
    """Go on to `num` steps, each of a group of its own that was sampled by the newest version."""
    for done in range(len(steps(log)), num):
        send(log, *(scored(done, sample, done) for sample in range(2)))
        run_steps(log, trainer, done + 1)


def finish(log: MemoryLog, config: RunConfig) -> None:
    """A successor takes over and makes all the steps that are left."""
    successor = make_trainer(log, config, "two", takeover=True)
    tick_until(successor, lambda: successor.done)
    successor.close()
