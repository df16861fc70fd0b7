"""From a prompt to a scored rollout: drive the engine, segment by segment, until the sample ends.

Runs on the engine's event loop. An engine may end a segment because the policy changed (the next
segment follows automatically) or because the request was aborted; then the sample is requested
again with the tokens so far, and continues under the weights that the engine holds by then.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from schemas.events import EVALUATE, Prompt
from workers.config.run import RolloutSection
from workers.engines.base import (
    Engine,
    EngineError,
    FinishReason,
    GeneratedSegment,
    PromptTooLongError,
    SampleRequest,
    Sampling,
)
from workers.rollout.reward import Judgement, Verifier
from workers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished sample, not yet an event."""

    segments: tuple[GeneratedSegment, ...]
    judgement: Judgement
    attempt: int
    started_s: float  # monotonic
    finished_s: float


def sampling_of(section: RolloutSection) -> Sampling:
    """What an engine is asked for."""
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_new_tokens=section.max_new_tokens,
    )


def judging_threads(num_at_once: int = 4) -> ThreadPoolExecutor:
    """A thread for each judgement that may be waited for; they are started as they are needed."""
    return ThreadPoolExecutor(max_workers=num_at_once, thread_name_prefix="judge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """All that a sample needs."""

    engine: Engine
    verifier: Verifier
    tokenizer: Tokenizer
    sampling: Sampling
    evaluation: Sampling | None = None  # of held-out rows; None: as all others
    max_attempts: int
    deadline_s: float
    # Its own: answers that wait for a slow verifier must not hold up a pull, which needs a thread.
    judging: ThreadPoolExecutor = field(default_factory=judging_threads)

    async def roll_out(self, prompt: Prompt) -> Rollout:
        """Generate and judge one sample.

        Raises:
            PromptTooLongError: no room for an answer.
            EngineError: the engine failed `max_attempts` times; the last failure.
            TimeoutError: not finished within `deadline_s`.
            RewardError: the verifier failed.
        """
        started_s = time.monotonic()
        attempt, segments = await self.generate(prompt)
        sampled = np.concatenate([segment.token_ids for segment in segments])
        judgement = await self._judged(prompt, sampled.tolist(), segments[-1].finish_reason)
        return Rollout(
            segments=tuple(segments),
            judgement=judgement,
            attempt=attempt,
            started_s=started_s,
            finished_s=time.monotonic(),
        )

    async def _judged(
        self, prompt: Prompt, sampled: list[int], finish_reason: FinishReason
    ) -> Judgement:
        judge = partial(
            self.verifier.judge,
            prompt.text,
            self.tokenizer.decode(sampled),
            prompt.answer,
            json.loads(prompt.metadata or "{}"),
            finish_reason,
            sampled,
        )
        # Two changes of thread cost more than a judgement that does not wait.
        if not self.verifier.waits:
            return judge()
        return await asyncio.get_running_loop().run_in_executor(self.judging, judge)

    async def generate(self, prompt: Prompt) -> tuple[int, list[GeneratedSegment]]:
        """The attempt that succeeded, and its segments; raises as `roll_out` does."""
        prompt_ids = prompt.token_ids.numpy().astype(np.int32, copy=False)
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._attempts(prompt, prompt_ids)
        except TimeoutError:
            raise TimeoutError(
                f"sample {prompt.group_id}/{prompt.sample} was not finished by engine "
                f"{self.engine.name} within {self.deadline_s:g} s"
            ) from None

    def _sampling_of(self, prompt: Prompt) -> Sampling:
        return (prompt.purpose == EVALUATE and self.evaluation) or self.sampling

    async def _attempts(
        self, prompt: Prompt, prompt_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> tuple[int, list[GeneratedSegment]]:
        for attempt in range(self.max_attempts):
            try:
                return attempt, await self._generate(prompt, prompt_ids, attempt)
            except EngineError as err:
                if isinstance(err, PromptTooLongError) or attempt + 1 == self.max_attempts:
                    raise
        raise AssertionError("max_attempts is at least 1")

    async def _generate(
        self,
        prompt: Prompt,
        prompt_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        attempt: int,
    ) -> list[GeneratedSegment]:
        segments: list[GeneratedSegment] = []
        while not segments or segments[-1].finish_reason is FinishReason.ABORT:
            request = SampleRequest(
                sample_id=f"{prompt.group_id}/{prompt.sample}/{attempt}",
                group_id=prompt.group_id,
                token_ids=np.concatenate([prompt_ids, *(s.token_ids for s in segments)]),
                prompt_tokens=len(prompt_ids),
                sampling=self._sampling_of(prompt),
                seed=prompt.seed,
            )
            begun = len(segments)
            async for segment in self.engine.generate(request):
                segments.append(segment)
            if len(segments) == begun:
                raise EngineError(
                    f"engine {self.engine.name} ended request {request.sample_id} without a segment"
                )
        return [segment for segment in segments if len(segment.token_ids)] or segments[-1:]
