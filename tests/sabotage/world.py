"""One vLLM for all kinds of sabotage, behind the engine that a rollout worker has."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.config.operation import GuardSection
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.trainer.guard import Guard, band
from rlstreams.workers.weights import server_plugin
from tests.contract.engine_rigs import version_weights
from tests.sabotage import inside
from tests.servers.real import long_model, real_engine, vllm_server
from tests.sites import Site, assert_named, mean_of, sound_step, worst_of

GROUPS, GROUP_SIZE = 6, 4
PROMPT_TOKENS, NUM_TOKENS = 300, 40  # two blocks of vLLM's prefix cache and a bit
SOUND_STEPS = 3
BY = GuardSection()


@dataclass(frozen=True)
class Server:
    """A vLLM that does as `order` says."""

    url: str
    folder: Path
    order: Path


@contextmanager
def server(folder: Path, dtype: str = "float32") -> Iterator[Server]:
    """Ready, with our plugin and that of the tests."""
    order = folder / "order"
    order.write_text("")
    theirs, ours = inside.lay_out(folder / "theirs"), server_plugin.environment(folder / "plugin")
    path = os.pathsep.join([str(theirs), ours["PYTHONPATH"]])
    plugin = {**ours, "PYTHONPATH": path, inside.ORDER: str(order)}
    with vllm_server(folder, plugin, dtype=dtype) as url:
        yield Server(url, folder, order)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the guard said of the first step with a kind of sabotage. Nats a token."""

    kind: str
    said: str  # empty: nothing
    mean: float  # of the step
    worst_sample: float
    noise: tuple[float, ...]  # of the sound steps before, of which it said nothing
    limit: float  # of the mean, by what it had learnt


@asynccontextmanager
async def site_of(server: Server, folder: Path) -> AsyncIterator[Site]:
    """A worker's engine, and a scorer of the same model."""
    model = long_model(folder)
    engine = real_engine("vllm", server.url, model, folder, stops=False, limit=64)
    draw = np.random.default_rng(0)
    prompts = draw.integers(3, inside.VOCAB, (GROUPS, PROMPT_TOKENS), np.int32)
    await engine.start()
    try:
        yield Site(
            engine, scorer_of(model), version_weights("vllm", 0), folder / "versions",
            np.repeat(prompts, GROUP_SIZE, axis=0), Sampling(max_new_tokens=NUM_TOKENS),
        )  # fmt: skip
    finally:
        await engine.close()


async def sabotaged(server: Server, folder: Path, kind: str) -> Found:
    """Sound steps, one with the sabotage, and a sound one again."""
    async with site_of(server, folder) as site:
        guard = Guard(BY)
        noise = [await sound_step(site, guard) for _ in range(SOUND_STEPS)]
        limit = min(BY.limit, band(noise, BY.factor))
        server.order.write_text(kind)
        try:
            batch = await site.step()
        finally:
            server.order.write_text("")
        if said := guard.look(batch):
            assert_named(said, batch, f"{site.engine.name} at {server.url}", site.version)
        await sound_step(site, guard)
        return Found(
            kind=kind, said=said, mean=mean_of(batch), noise=tuple(noise), limit=limit,
            worst_sample=float(worst_of(batch).distance_N.mean()),
        )  # fmt: skip
