"""vLLM's log-probs are those of Hugging Face, after each of ten pulls of changed weights.

vLLM for the CPU packs its experts on the first load only: without the transfer plugin's remedy an
update with equal weights already changes log-probs by half a nat.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rlstreams.workers.engines.base import Engine, TokenSequence
from tests.contract.engine_rigs import PROMPT, RealRig, collect, driven, request

pytestmark = pytest.mark.vllm
PULLS = 10
GREATEST = 1e-4  # nats, float32


@pytest.fixture
def rig(vllm_url: str, tmp_path: Path) -> RealRig:
    return RealRig("vllm", tmp_path, url=vllm_url)


async def gap(rig: RealRig, engine: Engine, version: int) -> float:
    """The greatest difference of sampled tokens' log-probs, of answers to several prompts."""
    scorer = rig.scorer()
    scorer.pull(rig.publish(version), rig.channel)
    wanted = [
        request(f"{i}/0/{version}", token_ids=PROMPT[: 2 + i], max_new_tokens=24) for i in range(5)
    ]
    answers = await asyncio.gather(*(collect(engine, one) for one in wanted))
    sequences = [
        TokenSequence(token_ids=np.concatenate([one.token_ids, segment.token_ids]))
        for one, (segment,) in zip(wanted, answers, strict=True)
    ]
    scores = scorer.score(sequences, version, 1.0)
    return max(
        float(np.abs(segment.logprobs - score.logprobs[len(one.token_ids) :]).max())
        for one, (segment,), score in zip(wanted, answers, scores, strict=True)
    )


async def test_logprobs_follow_ten_pulls(rig: RealRig) -> None:
    """Every pull changes every tensor; what vLLM samples from is what was published."""
    async with driven(rig.engine()) as engine:
        gaps = []
        for version in range(1, PULLS + 1):
            await engine.pull(rig.publish(version), rig.channel)
            gaps.append(await gap(rig, engine, version))
        print(f"greatest differences: {', '.join(f'{g:.1e}' for g in gaps)}")  # noqa: T201
        assert max(gaps) < GREATEST


async def test_an_update_with_equal_weights_changes_nothing(rig: RealRig) -> None:
    """The identity update: greedy answers and their log-probs stay, to the last bit but few."""
    async with driven(rig.engine()) as engine:
        published = rig.publish(0)
        await engine.pull(published, rig.channel)
        (before,) = await collect(engine, request(temperature=0.0, max_new_tokens=24))
        again = rig.engine()  # it knows nothing of what the server holds, and pulls it anew
        await again.start()
        await again.pull(published, rig.channel)
        (after,) = await collect(again, request(temperature=0.0, max_new_tokens=24))
        await again.close()
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert np.abs(after.logprobs - before.logprobs).max() < 1e-5
