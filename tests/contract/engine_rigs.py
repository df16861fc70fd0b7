"""Engines and scorers to hold to their ports, each with versions to pull."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.engines.base import (
    Engine,
    GeneratedSegment,
    Int32s,
    SampleRequest,
    Sampling,
    Scorer,
)
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.model.model import load_model, weights_of
from rlstreams.workers.weights.channel import WeightManifest
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests.contract.engine_waits import DEADLINE_S, cut, num_running, until_running
from tests.fake_engine import EOS, FakeEngine, FakeScorer, fake_weights
from tests.servers.fake_server import TELLING, VERSIONS, FakeServer
from tests.servers.real import (
    LONG_MODEL_TOKENS,
    freeze,
    long_model,
    num_generated,
    real_engine,
    step,
    thaw,
)
from tests.servers.served import served_engine

E = TypeVar("E", bound=Engine)
DEMO_MODEL = Path(__file__).parents[2] / "infra" / "examples" / "demo" / "model"
DEMO_KINDS = ("builtin", "vllm")  # what samples from the demo's model
KINDS = ("fake", "builtin")
# By day `test_vllm_logprobs` and `test_vllm_records` ask the real one.
REAL = pytest.param("vllm", marks=(pytest.mark.vllm, pytest.mark.slow))
SERVED = VERSIONS  # of the stand-in server, each behind the adapter of its kind


@cache
def _demo_weights() -> dict[str, torch.Tensor]:
    return weights_of(load_model(DEMO_MODEL))


def version_weights(kind: str, policy_version: int) -> Mapping[str, torch.Tensor]:
    """Version 0, and others that differ from it a little."""
    if kind not in DEMO_KINDS:
        return fake_weights(policy_version)
    generator = torch.Generator().manual_seed(policy_version)
    weights = {
        name: tensor + 0.02 * policy_version * torch.randn(tensor.shape, generator=generator)
        for name, tensor in _demo_weights().items()
    }
    weights["lm_head.weight"][EOS] = 0  # answers rarely end by themselves
    if kind == "vllm":
        weights["lm_head.weight"] /= 4
    return weights


def announced(server: FileWeightServer, manifest: WeightManifest) -> PolicyPublished:
    return PolicyPublished(
        model="demo",
        policy_version=manifest.policy_version,
        weight_hash=manifest.weight_hash,
        epoch=1,
        instance="trainer-0",
        step=manifest.policy_version,
        num_bytes=manifest.num_bytes,
        layout=manifest.layout,
        endpoints=tuple(server.endpoints()),
        versions_served=tuple(server.versions()),
        published_at_ms=0,
    )


@dataclass
class Rig:
    """One kind of engine with a folder of versions."""

    kind: str
    folder: Path
    channel: FileWeightChannel = field(default_factory=FileWeightChannel)
    stops: bool = True  # whether a real server may end an answer by itself

    def __post_init__(self) -> None:
        self.server = FileWeightServer(self.folder, keep=4)

    def engine(self, *, slots: int = 8) -> Engine:
        return (
            FakeEngine(slots=slots)
            if self.kind == "fake"
            else BuiltinEngine(DEMO_MODEL, slots=slots)
        )

    def scorer(self) -> Scorer:
        return scorer_of(DEMO_MODEL) if self.kind in DEMO_KINDS else FakeScorer()

    @property
    def replays_draws(self) -> bool:
        """Whether the draw at a position is keyed by sample and position alone."""
        return True

    @property
    def rows_of_aborted(self) -> bool:
        """Whether an aborted request still brings its routed experts."""
        return True

    @property
    def goes_on(self) -> bool:
        """Whether requests live through a pull; else they end with ABORT, to be resumed."""
        return True

    @property
    def counts_abandoned(self) -> bool:
        """Whether it learns what was sampled for requests that nobody waited for."""
        return self.kind in ("fake", "builtin")

    @property
    def captures_experts(self) -> bool:
        """Whether answers bring routed experts."""
        return True

    @property
    def long_tokens(self) -> int:
        """How many tokens a long request samples."""
        return 110

    @property
    def long(self) -> str:
        """A sample whose long request does not end early."""
        return "0/0/0"

    def heat(self, temperature: float) -> float:
        """A temperature that the engine takes."""
        return temperature

    @property
    def keeps_cache(self) -> bool:
        """Whether tokens after a pull still depend on keys and values from before."""
        return self.kind in DEMO_KINDS

    def hold(self) -> None:
        """From now on whoever has a token stands still in a server, until the next pause or
        `hasten`: however late a test comes to cut it, it has not ended by itself."""

    async def until_sampling(self, engine: Engine) -> None:
        """Until a request runs that has a token; held servers only."""
        await until_running(engine)

    def long_request(self, sample_id: str | None = None) -> SampleRequest:
        """As `long_request`; of `long`, if no sample is named."""
        return long_request(sample_id or self.long)

    async def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it while another request is held, which does not end before."""
        await work

    def endless_request(self, sample_id: str | None = None) -> SampleRequest:
        """One that is still running when a slow machine comes to cut it."""
        return self.long_request(sample_id)

    def hasten(self) -> None:
        """What was to be cut was cut: the rest may be quick."""

    async def end(self, engine: Engine) -> None:
        """Have an endless request end, some tokens later."""

    def close(self) -> None:
        """Release what the rig holds."""

    def publish(self, policy_version: int) -> PolicyPublished:
        weights = version_weights(self.kind, policy_version)
        return announced(self.server, self.server.publish(policy_version, weights))


@dataclass
class ServedRig(Rig):
    """The adapter of servers, with a stand-in server that behaves."""

    def __post_init__(self) -> None:
        self.server = FileWeightServer(self.folder, keep=4)
        self.fake = FakeServer(self.kind)

    def engine(self, *, slots: int = 8) -> Engine:
        return served_engine([self.fake], self.folder, limit=slots)

    @property
    def replays_draws(self) -> bool:
        return False

    @property
    def goes_on(self) -> bool:
        return self.kind in TELLING

    def hold(self) -> None:
        self.fake.core.holds = True

    async def until_sampling(self, engine: Engine) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not any(job.token_ids for job in self.fake.core.jobs.values()):
            assert time.monotonic() < until_s, "nothing is sampled"
            await asyncio.sleep(0.001)

    def hasten(self) -> None:
        self.fake.core.holds = False

    async def end(self, engine: Engine) -> None:
        self.hasten()

    def close(self) -> None:
        self.fake.close()


@dataclass
class RealRig(Rig):
    """The adapter of servers, with a server that runs for the whole session."""

    url: str = ""

    def __post_init__(self) -> None:
        self.server = FileWeightServer(self.folder, keep=4)
        self.model = long_model(self.folder)

    def engine(self, *, slots: int = 8) -> Engine:
        return real_engine(
            self.kind, self.url, self.model, self.folder, stops=self.stops, limit=slots
        )

    @property
    def replays_draws(self) -> bool:
        return False

    @property
    def captures_experts(self) -> bool:
        return False  # a build for the CPU cannot

    @property
    def rows_of_aborted(self) -> bool:
        return False

    @property
    def long_tokens(self) -> int:
        return 1500  # a second or more

    def long_request(self, sample_id: str | None = None) -> SampleRequest:
        """Nearly greedy: such an answer rarely ends by itself."""
        return request(sample_id or self.long, temperature=0.1, max_new_tokens=self.long_tokens)

    def endless_request(self, sample_id: str | None = None) -> SampleRequest:
        """Ten seconds' work for the server, on a quick machine."""
        return replace(
            self.long_request(sample_id),
            sampling=Sampling(temperature=0.1, max_new_tokens=LONG_MODEL_TOKENS - 100),
        )

    def hold(self) -> None:
        freeze(self.url)
        self.counted = num_generated(self.url)

    def hasten(self) -> None:
        thaw(self.url)

    def close(self) -> None:
        thaw(self.url)

    async def end(self, engine: Engine) -> None:
        """A step counts a token or two at most: of sixteen some came after it."""
        thaw(self.url)
        before = self.counted
        async for num_tokens in self._counting():
            if num_tokens >= before + 16 or not num_running(engine):
                break
        await cut(engine)

    def scorer(self) -> Scorer:
        return scorer_of(self.model)

    def heat(self, temperature: float) -> float:
        return min(temperature, 2.0)  # vLLM refuses more; its weights are flatter for that

    async def until_sampling(self, engine: Engine) -> None:
        """The server counts tokens as it samples them."""
        before = self.counted
        async for num_tokens in self._counting():
            if num_tokens > before:
                break
            await asyncio.to_thread(step, self.url)

    async def beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        async for _ in self._counting():
            if task.done():
                break
            await asyncio.to_thread(step, self.url)
        await task

    async def _counting(self) -> AsyncIterator[float]:
        """Its tokens, again and again."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            self.counted = await asyncio.to_thread(num_generated, self.url)
            yield self.counted
        raise AssertionError("nothing is sampled")


def make_rig(request: pytest.FixtureRequest, folder: Path) -> Rig:
    """The rig of the fixture's parameter, with a folder for its versions."""
    kind = str(request.param)
    if kind in SERVED:
        return ServedRig(kind, folder)
    if kind in ("vllm", "sglang"):
        return RealRig(kind, folder, url=request.getfixturevalue("vllm_url"))
    return Rig(kind, folder)


PROMPT = np.array([1, 8, 4, 9, 4, 7, 8], np.int32)


def request(
    sample_id: str = "0/0/0",
    *,
    token_ids: Int32s = PROMPT,
    prompt_tokens: int | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 12,
    top_p: float = 1.0,
    top_k: int = 0,
) -> SampleRequest:
    return SampleRequest(
        sample_id=sample_id,
        group_id=sample_id.partition("/")[0],
        token_ids=token_ids,
        prompt_tokens=len(token_ids) if prompt_tokens is None else prompt_tokens,
        sampling=Sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens
        ),
        seed=7,
    )


def long_request(sample_id: str) -> SampleRequest:
    """Nearly uniform draws: both engines go on for a hundred tokens, but for rare early ends."""
    return request(sample_id, temperature=8.0, max_new_tokens=110)


@asynccontextmanager
async def driven(engine: E) -> AsyncIterator[E]:
    """The engine, started; closed at the end, which comes by a deadline."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            yield engine
    finally:
        await engine.close()


async def collect(engine: Engine, wanted: SampleRequest) -> list[GeneratedSegment]:
    return [segment async for segment in engine.generate(wanted)]


def tokens(segments: list[GeneratedSegment]) -> list[int]:
    return [int(t) for segment in segments for t in segment.token_ids]


def rows_of(segments: list[GeneratedSegment]) -> list[int]:
    """The positions whose expert rows the segments carry, in order."""
    return [
        segment.routed_experts_start + row
        for segment in segments
        if segment.routed_experts is not None
        for row in range(len(segment.routed_experts))
    ]
