"""What a recording holds: one call after another, so that a replay needs no clock."""

from __future__ import annotations

import numpy as np

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightChannel
from tests.contract.engine_rigs import collect, request, tokens

PROMPTS = ([1, 8, 4, 9], [1, 5], [3, 7, 9, 2, 11, 4])


async def exercise(
    engine: ServedEngine, versions: tuple[PolicyPublished, PolicyPublished], channel: WeightChannel
) -> list[str]:
    """Pull, sample, pause, twice; ask what cannot be. What was seen, in lines."""
    seen = []
    for published in versions:
        pulled = await engine.pull(published, channel)
        seen.append(f"{engine.name} pulled {pulled.policy_version} ({pulled.weight_hash[:16]})")
        for number, ids in enumerate(PROMPTS):
            for temperature in (0.0, 1.0):
                wanted = request(
                    f"{number}/0/0",
                    token_ids=np.array(ids, np.int32),
                    temperature=temperature,
                    max_new_tokens=6,
                )
                segments = await collect(engine, wanted)
                assert {s.policy_version for s in segments} == {published.policy_version}
                assert all(len(s.logprobs) == len(s.token_ids) for s in segments)
                seen.append(f"{wanted.sample_id} at {temperature}: {tokens(segments)}")
        (server,) = engine._servers
        await server._stop(PauseMode.KEEP)
        await server._met.resume()
    try:
        await collect(engine, request(token_ids=np.array([engine.vocab_size], np.int32)))
    except EngineError as err:
        seen.append(f"refused: {err}")
    return seen
