"""A stand for one role alone: an in-memory log, a publisher of fake weights, and ticks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlstreams.schemas.events import Event, PolicyPublished, Prompt, Tensor
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import POLICY_VERSIONS, PROMPTS
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.runtime import Role
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier
from rlstreams.workers.weights.file import FileWeightServer
from tests import factories
from tests.fake_engine import FakeEngine, fake_weights
from tests.logs import made_log
from tests.memory.bus import MemoryBus

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"
DEADLINE_S = 240.0
BRIEF = {  # nobody else's records are on their way
    "rollout.commit_interval_s": 0.001,
    "logprob.commit_interval_s": 0.001,
    "logprob.window_s": 0.005,
}
E = TypeVar("E")


class Stand:
    """The world around one role."""

    def __init__(self, folder: Path, **overrides: object) -> None:
        self.log = made_log("demo", 2)
        values = (
            {"run.dir": folder} | BRIEF | {k.replace("__", "."): v for k, v in overrides.items()}
        )
        self.config: RunConfig = load([EXAMPLE], [f"{k}={v}" for k, v in values.items()])
        self.server = FileWeightServer(folder / "weights", keep=4)
        self._pen = self.bus().producer("stand")

    def bus(self) -> Bus:
        return MemoryBus(self.log, "demo")

    def context(self, role: str, ordinal: int = 0) -> Context:
        instance = f"instance-{time.monotonic_ns()}"
        return Context(
            config=self.config, bus=self.bus(), role=role, ordinal=ordinal, instance=instance
        )

    def publish(self, version: int, *, announce: bool = True) -> PolicyPublished:
        manifest = self.server.publish(version, fake_weights(version))
        event = factories.policy_published(
            version,
            weight_hash=manifest.weight_hash,
            layout=manifest.layout,
            endpoints=tuple(self.server.endpoints()),
            versions_served=tuple(self.server.versions()),
            epoch=1,
        )
        if announce:
            self._pen.commit([outgoing(POLICY_VERSIONS, event)])
        return event

    def issue(self, group_id: str, num: int, *, partition: int = 0, **changes: Any) -> None:
        self._pen.commit(
            [
                outgoing(
                    PROMPTS, make_prompt(group_id, sample, num, **changes), partition=partition
                )
                for sample in range(num)
            ]
        )

    def send(self, *records: Outgoing) -> None:
        self._pen.commit(records)

    def read(self, topic: str, kind: type[E]) -> list[E]:
        bus = self.bus()
        raws = bus.reader(bus.beginnings(topic)).poll(10_000, 0.0)
        events: list[Event] = [decoded(raw).event for raw in raws]
        return [event for event in events if isinstance(event, kind)]


def make_prompt(group_id: str, sample: int, group_size: int, **changes: Any) -> Prompt:
    values = {
        "group_id": group_id,
        "sample": sample,
        "group_size": group_size,
        "token_ids": Tensor.of(np.array([3, 5, 7], np.int32)),
        "metadata": "{}",
        "min_policy_version": 0,
    }
    return factories.prompt(**(values | changes))


async def length(sample: AnswerToJudge) -> Judgement:
    """One point per character; refuses the answer "refuse"."""
    if sample.answer == "refuse":
        raise RewardError("verifier.py:7 refused")
    num = float(len(sample.completion))
    return Judgement(reward=num, parts={"length": num})


def make_sampler(stand: Stand, engine: FakeEngine, *, max_new_tokens: int = 6) -> Sampler:
    return Sampler(
        engine=engine,
        verifier=Verifier(length, require_stop=False),
        tokenizer=Tokenizer.load(stand.config.model.path),
        sampling=Sampling(max_new_tokens=max_new_tokens),
        max_attempts=2,
        deadline_s=DEADLINE_S,
    )


def tick_until(role: Role, reached: Callable[[], bool]) -> None:
    """Drive the role until something holds; fails when it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, "not reached in time"
        role.tick()
