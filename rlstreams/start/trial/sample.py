"""Answers to a few rows, sampled and judged as a run would do it; what fails is kept, with why."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence

from rlstreams.schemas.events import Prompt
from rlstreams.start.trial.show import Completion, Times, TriedRow
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.limits import PromptEncoder
from rlstreams.workers.dataset.row import Row
from rlstreams.workers.engines.base import FinishReason, Sampling
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.prompts.issue import prompt_of
from rlstreams.workers.rollout.episode import Played
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.rollout.turns import Turns
from rlstreams.workers.sandbox.reward import RewardError, Sample, Verifier
from rlstreams.workers.sandbox.user_code import UserCodeError


class Trial:
    """Model and verifier, loaded.

    Args:
        turns: makes what samples of several turns need, for an engine's vocabulary.

    Raises:
        EngineError: from the constructor: the model cannot be loaded or decoded.
    """

    def __init__(
        self,
        config: RunConfig,
        verifier: Verifier,
        encoder: PromptEncoder,
        turns: Callable[[int], Turns | None] = lambda _: None,
    ) -> None:
        started_s = time.monotonic()
        self.times = Times()
        self._config = config
        self._encoder = encoder
        folder = model_folder(config.model.path)
        self._channel = FolderChannel(folder, config.model.dtype)
        rollout = config.rollout
        self._engine = BuiltinEngine(
            folder,
            slots=rollout.slots,
            threads=config.model.threads,
            capture_experts=False,
            pull_deadline_s=config.weights.pull_deadline_s,
            dtype=config.model.dtype,
        )
        self._tokenizer = Tokenizer.load(folder)
        self._verifier = verifier
        self._sampler = Sampler(
            engine=self._engine,
            verifier=verifier,
            tokenizer=self._tokenizer,
            sampling=Sampling(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_new_tokens=rollout.max_new_tokens,
            ),
            turns=turns(self._engine.vocab_size),
            max_attempts=rollout.max_attempts,
            deadline_s=rollout.sample_deadline_s,
        )
        self.times.load_s = time.monotonic() - started_s

    def run(self, rows: Sequence[Row], num_samples: int) -> list[TriedRow]:
        """Sample `num_samples` answers to each row, all together, and judge them."""
        prompts = [
            prompt_of(row, self._encoder, self._config.run.seed, group_id=str(row.number))
            for row in rows
        ]
        reasons = [self._left_out(prompt) for prompt in prompts]
        started_s = time.monotonic()
        answers = asyncio.run(
            self._sample(
                [p for p, why in zip(prompts, reasons, strict=True) if not why], num_samples
            )
        )
        self.times.sample_s = time.monotonic() - started_s
        tried = []
        for row, prompt, why in zip(rows, prompts, reasons, strict=True):
            found = [] if why else answers.pop(0)
            ids = prompt.token_ids.numpy().tolist()
            completions = tuple(self._judged(row, prompt, answer) for answer in found)
            tried.append(TriedRow(row=row, prompt_ids=ids, left_out=why, completions=completions))
        return tried

    def close(self) -> None:
        """End the environment's processes."""
        if self._sampler.turns is not None:
            self._sampler.turns.environment.close()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _left_out(self, prompt: Prompt) -> str:
        data, count = self._config.data, len(prompt.token_ids)
        if count < data.min_prompt_tokens:
            return f"{count} tokens, data.min_prompt_tokens is {data.min_prompt_tokens}"
        if data.max_prompt_tokens and count > data.max_prompt_tokens:
            return f"{count} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}"
        if count >= self._engine.max_tokens:
            return (
                f"{count} tokens, the model takes {self._engine.max_tokens}: `up` refuses the row "
                "unless data.max_prompt_tokens leaves it out"
            )
        return ""

    async def _sample(
        self, prompts: Sequence[Prompt], num_samples: int
    ) -> list[list[Played | Exception]]:
        samples = [
            dataclasses.replace(prompt, sample=number)
            for prompt in prompts
            for number in range(num_samples)
        ]
        await self._engine.pull(self._channel.published, self._channel)
        try:
            found = await asyncio.gather(*map(self._answer, samples))
        finally:
            await self._engine.close()
        return [found[at : at + num_samples] for at in range(0, len(found), num_samples)]

    async def _answer(self, prompt: Prompt) -> Played | Exception:
        try:
            return await self._sampler.generate(prompt)
        except (EngineError, UserCodeError, TimeoutError) as err:  # what a run would set aside
            return err

    def _judged(self, row: Row, prompt: Prompt, answer: Played | Exception) -> Completion:
        if isinstance(answer, Exception):
            return Completion(text="", finish_reason="", rejected=str(answer))
        last, judgement, rejected = answer.last, answer.judgement, ""
        note = "" if judgement is None else "by the environment"
        started_s = time.monotonic()
        try:
            judgement = judgement or self._verifier.judge(
                Sample(
                    prompt.text, last.text, row.answer, json.loads(row.metadata),
                    last.finish_reason, last.token_ids, answer.transcript,
                )
            )  # fmt: skip
        except RewardError as err:
            rejected = str(err)
        judge_s = time.monotonic() - started_s
        self.times.judge_s.append(judge_s)
        self.times.num_tokens += sum(len(turn.token_ids) for turn in answer.turns)
        if last.finish_reason != FinishReason.STOP:
            note = f"cut at rollout.max_new_tokens = {self._config.rollout.max_new_tokens}"
            if self._config.reward.require_stop:
                note += "; a cut answer earns 0 while reward.require_stop is true"
        return Completion(
            text=last.text,
            before=answer.transcript[:-1],
            token_ids=last.token_ids,
            finish_reason=last.finish_reason,
            judgement=judgement,
            rejected=rejected,
            note=note,
            judge_s=judge_s,
        )
