"""Judging answers beside everything else that a rollout worker does."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlstreams.schemas.events import EVALUATE, Prompt
from rlstreams.workers.engines.fake import FakeEngine
from rlstreams.workers.rollout.reward import Judgement, Transcript
from rlstreams.workers.rollout.sampling import Sampler, sampling_of
from rlstreams.workers.weights.file import FileWeightChannel
from tests.unit.roles.stand import DEADLINE_S, LengthVerifier, Stand, make_prompt, make_sampler
from tests.waiting import until

LIMIT_S = 10.0  # missed, a thread was held up


class SlowVerifier(LengthVerifier):
    """Judges once it is allowed to."""

    waits = True

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_judge = threading.Event()

    def judge(
        self,
        prompt: str,
        completion: str,
        answer: str,
        metadata: object,
        finish_reason: str,
        token_ids: Sequence[int] = (),
        transcript: Transcript = (),
    ) -> Judgement:
        self.is_asked.set()
        assert self.may_judge.wait(DEADLINE_S)
        return super().judge(prompt, completion, answer, metadata, finish_reason, token_ids)


def test_a_slow_verifier_holds_up_no_other_thread(tmp_path: Path) -> None:
    """A pull needs a thread while generation stands still: judging takes none of those."""
    stand = Stand(tmp_path)
    verifier, engine = SlowVerifier(), FakeEngine(slots=4)
    sampler = dataclasses.replace(make_sampler(stand, engine), verifier=verifier)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await engine.pull(stand.publish(0), FileWeightChannel())
        rollout = asyncio.create_task(sampler.roll_out(make_prompt("0", 0, 1)))
        try:
            await until(verifier.is_asked.is_set, "nothing is judged")
            await asyncio.wait_for(asyncio.to_thread(threading.get_ident), LIMIT_S)
        finally:
            verifier.may_judge.set()
        assert (await rollout).judgement.reward > 0
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_held_out_rows_are_sampled_as_they_are_to_be(tmp_path: Path) -> None:
    """Temperature and length of their own; training is as before."""
    stand = Stand(tmp_path)
    engine = FakeEngine(slots=4)
    asked = dataclasses.replace(
        stand.config.prompts, evaluate_temperature=0.0, evaluate_max_tokens=2
    )
    config = dataclasses.replace(stand.config, prompts=asked)
    sampler = dataclasses.replace(
        make_sampler(stand, engine),
        sampling=sampling_of(config.rollout),
        evaluation=sampling_of(config.evaluation),
    )
    train = make_prompt("0", 0, 1)
    evaluate = dataclasses.replace(train, group_id="e0-0", purpose=EVALUATE)
    assert (0.0, 2) == _asked_for(sampler, evaluate)
    usual = config.rollout
    assert (usual.temperature, usual.max_new_tokens) == _asked_for(sampler, train)


def _asked_for(sampler: Sampler, prompt: Prompt) -> tuple[float, int]:
    asked = sampler._sampling_of(prompt)
    return asked.temperature, asked.max_new_tokens
