"""What only the built-in engine can suffer: its thread, its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import Rig, announced, collect, request, version_weights


def broken(rig: Rig, policy_version: int) -> PolicyPublished:
    """A version whose weights are not numbers, published in good order."""
    weights = {n: torch.full_like(t, torch.nan) for n, t in version_weights("builtin", 0).items()}
    return announced(rig.server, rig.server.publish(policy_version, weights))


async def test_a_failed_decode_thread_ends_every_request(tmp_path: Path) -> None:
    """Nobody hangs: running, waiting and later requests hear what failed; so does health."""
    rig = Rig("builtin", tmp_path)
    engine = rig.engine(slots=2)
    await engine.pull(broken(rig, 0), rig.channel)

    async def collect(sample_id: str) -> None:
        async for _ in engine.generate(request(sample_id)):
            pass

    async with asyncio.timeout(240):
        results = await asyncio.gather(
            *(collect(f"{i}/0/0") for i in range(5)), return_exceptions=True
        )
    assert [type(result) for result in results] == [EngineError] * 5
    assert all("not finite" in str(result) for result in results)
    assert not engine.is_ready
    with pytest.raises(EngineError, match="not finite"):
        await engine.pull(rig.publish(1), rig.channel)
    await engine.close()


async def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """Names are compared before anything is copied; the version held goes on."""
    rig = Rig("builtin", tmp_path)
    engine = rig.engine()
    await engine.pull(rig.publish(0), rig.channel)
    weights = {"table": torch.zeros(3)}
    published = announced(rig.server, rig.server.publish(1, weights))
    with pytest.raises(WeightError, match=r"lm_head\.weight is missing"):
        await engine.pull(published, rig.channel)
    assert engine.policy_version == 0
    assert [segment async for segment in engine.generate(request())]
    await engine.close()


async def test_the_cache_is_used_again_when_all_have_left(tmp_path: Path) -> None:
    rig = Rig("builtin", tmp_path)
    engine = rig.engine(slots=2)
    await engine.pull(rig.publish(0), rig.channel)
    for number in range(12):
        await collect(engine, request(f"{number}/0/0", max_new_tokens=20))
    assert isinstance(engine, BuiltinEngine)
    assert engine._decoder._cache.num_columns == 64
    await engine.close()
