"""The log-prob role along recorded routes: what an engine sampled, scored as it was sampled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlstreams.workers.compute.score import MeshScorer, scorer_of
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.rollout.trajectory import stitch_experts
from tests.contract.engine_rigs import DEMO_MODEL, collect, request

PROMPTS = ([1, 5, 9, 20, 30, 7, 8], [4], [3, 3, 40, 41, 11])


@pytest.fixture(scope="module")
def sampled() -> list[TokenSequence]:
    """Whole sequences with the routes that their tokens took."""

    async def run() -> list[TokenSequence]:
        engine, channel = BuiltinEngine(DEMO_MODEL, slots=4), FolderChannel(DEMO_MODEL)
        await engine.start()
        await engine.pull(channel.published, channel)
        found = []
        for number, prompt in enumerate(PROMPTS):
            wanted = request(f"{number}/0/0", token_ids=np.array(prompt, np.int32))
            segments = await collect(engine, wanted)
            experts, mask = stitch_experts(segments, len(prompt))
            ids = np.concatenate([np.array(prompt, np.int32), *(s.token_ids for s in segments)])
            assert mask is None
            found.append(TokenSequence(token_ids=ids, routed_experts=experts))
        await engine.close()
        return found

    return asyncio.run(run())


def scorer(*, replay_routes: bool) -> MeshScorer:
    made, channel = (
        scorer_of(DEMO_MODEL, replay_routes=replay_routes),
        FolderChannel(DEMO_MODEL),
    )
    made.pull(channel.published, channel)
    return made


def logprobs(by: MeshScorer, sequences: list[TokenSequence]) -> list[Any]:
    return [found.logprobs for found in by.score(sequences, by.versions[0], 1.0)]


def test_own_routes_give_the_live_router_s_bits(sampled: list[TokenSequence]) -> None:
    """In float32 the sampler chose as the scorer does; without routes, or off, likewise."""
    live, along = scorer(replay_routes=False), scorer(replay_routes=True)
    expected = logprobs(live, sampled)
    bare = [TokenSequence(token_ids=sequence.token_ids) for sequence in sampled]
    for found in (logprobs(along, sampled), logprobs(along, bare)):
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_routes_give_other_log_probs_behind_them(sampled: list[TokenSequence]) -> None:
    """Only of the sequence that has them, and only where they are recorded; but for rounding, for
    experts are computed for all tokens that they get."""
    along = scorer(replay_routes=True)
    expected = logprobs(along, sampled)
    experts = sampled[0].routed_experts
    assert experts is not None
    mask = np.ones(len(experts), np.uint8)
    mask[:3] = 0
    turned = replace(
        sampled[0],
        routed_experts=((experts + 1) % 8).astype(experts.dtype),
        routed_experts_mask=mask,
    )
    found = logprobs(along, [turned, *sampled[1:]])
    gaps = [np.abs(a - b) for a, b in zip(found, expected, strict=True)]
    assert float(gaps[0][:4].max()) < 1e-4
    assert float(gaps[0][4:].max()) > 1e-2
    assert all(float(gap.max()) < 1e-4 for gap in gaps[1:])


def test_routes_of_another_model_are_refused(sampled: list[TokenSequence]) -> None:
    """By the number of the sequence."""
    wrong = replace(sampled[1], routed_experts=np.full((12, 2, 2), 9, np.uint8))
    with pytest.raises(EngineError, match="sequence 1: routed_experts names expert 9, the model"):
        logprobs(scorer(replay_routes=True), [sampled[0], wrong])
