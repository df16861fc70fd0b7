"""Answers to a few rows, sampled and judged as a run would do it; a failed one keeps its reason."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlstreams.schemas.events import Prompt
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted
from rlstreams.streams.views.learning import NEVER_REWARDED
from rlstreams.words.screen import visible
from rlstreams.workers.bootstrap.sampling import builtin_engine, sampler_of
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.limits import PromptEncoder, PromptLimits
from rlstreams.workers.dataset.row import Row
from rlstreams.workers.engines.base import FinishReason
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.device import usable
from rlstreams.workers.prompts.issue import prompt_of
from rlstreams.workers.rollout.episode import Played
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier
from rlstreams.workers.sandbox.user_code import UserCodeError

Decode = Callable[[Sequence[int]], str]
T = TypeVar("T")
Say = Callable[[str], None]
_INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, and its judgement or the reason for which it has none."""

    text: str  # of the last turn
    before: Sequence[Mapping[str, str]] = ()  # turns before it: author and text
    token_ids: Sequence[int] = ()
    finish_reason: str = "stop"
    judgement: Judgement | None = None
    rejected: str = ""  # why a run would set the sample aside; empty: it would not
    note: str = ""  # remark beside the reward
    judge_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """A row with its answers."""

    row: Row
    prompt_ids: Sequence[int]
    left_out: str = ""  # why a run would not issue the row; then there are no answers
    completions: Sequence[Completion] = ()


@dataclass(slots=True)
class Times:
    """Time of each part of a trial, seconds."""

    import_s: float = 0.0
    load_s: float = 0.0
    sample_s: float = 0.0
    num_tokens: int = 0
    judge_s: list[float] = field(default_factory=list)


def row_lines(tried: TriedRow, index: int, total: int, decode: Decode) -> list[str]:
    """A row: the prompt as the model sees it, the answer wanted, the answers given."""
    shown = block(f"prompt, {len(tried.prompt_ids)} tokens", decode(tried.prompt_ids))
    lines = [f"row {index} of {total}  {tried.row.place}", *shown, *given_lines(tried)]
    for number, completion in enumerate(tried.completions, 1):
        for turn, said in enumerate(completion.before):
            who = f"completion {number}, turn {turn // 2 + 1}"
            lines += block(who if said["author"] == "policy" else "  environment", said["text"])
        size = f"{len(completion.token_ids)} tokens, {completion.finish_reason}"
        lines += block(f"completion {number}, {size}", completion.text)
        lines.append(f"  {verdict(completion)}")
    return [*lines, ""]


def given_lines(tried: TriedRow) -> list[str]:
    """Lines of a row's answer and metadata, and the reason for which it would not be issued."""
    lines = block("answer wanted", tried.row.answer) if tried.row.answer else []
    if tried.row.metadata not in ("", "{}"):
        lines += block("metadata", tried.row.metadata)
    return [*lines, f"  LEFT OUT: {tried.left_out}"] if tried.left_out else lines


def verdict(completion: Completion) -> str:
    """Line of an answer's reward with its parts, or of why it would be set aside."""
    if completion.judgement is None:
        return f"SET ASIDE: {completion.rejected}"
    parts = "".join(f"  {name} {value:g}" for name, value in completion.judgement.parts.items())
    note = f"  ({completion.note})" if completion.note else ""
    why = completion.judgement.note
    took = f"  [{1000 * completion.judge_s:.1f} ms]" if completion.judge_s else ""
    return (
        f"reward {completion.judgement.reward:g}{parts}{took}{note}"
        f"{f'  {_short(why)!r}' if why else ''}"
    )


def summary(rows: Sequence[TriedRow]) -> list[str]:
    """Lines over all rows: mean reward, failures, and whether there is something to learn."""
    completions = [c for row in rows for c in row.completions]
    rewards = [c.judgement.reward for c in completions if c.judgement is not None]
    lines = []
    if rewards:
        lines.append(
            f"{counted(len(rewards), 'answer')}, mean reward {statistics.mean(rewards):.2f}"
        )
        if not any(rewards):
            lines.append(
                f"no answer earned anything, so a run would not learn; read the answers: "
                f"{NEVER_REWARDED}"
            )
    if aside := len(completions) - len(rewards):
        lines.append(f"{aside} of {len(completions)} answers would be dead-lettered")
    if flat := sum(_is_flat(row) for row in rows):
        lines.append(
            f"{flat} of {len(rows)} rows get the same reward for every answer: such a group gives "
            "no gradient; more --samples or another temperature may separate them"
        )
    return lines


def spent(times: Times) -> list[str]:
    """Lines of the time that each part took."""
    rate = times.num_tokens / times.sample_s if times.sample_s else 0.0
    judged = f", {1000 * statistics.mean(times.judge_s):.1f} ms per reward" if times.judge_s else ""
    return [
        f"{times.import_s:.1f} s to import torch and transformers, {times.load_s:.1f} s to load "
        f"the model, {times.sample_s:.1f} s to sample "
        f"{times.num_tokens} tokens ({rate:,.0f} a second){judged}"
    ]


def _is_flat(row: TriedRow) -> bool:
    rewards = {c.judgement.reward for c in row.completions if c.judgement is not None}
    return len(row.completions) > 1 and len(rewards) == 1


def block(title: str, text: str) -> list[str]:
    """One line if the text is one, else indented below its title."""
    rows = visible(text).split("\n")
    if len(rows) == 1:
        return [f"  {title}: {text}"]
    return [f"  {title}:", *(f"{_INDENT}{row}" for row in rows)]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def loaded(config: RunConfig) -> tuple[FolderChannel, BuiltinEngine]:
    """Load the model's weights, and the engine that samples with them.

    Raises:
        EngineError: the model cannot be loaded or decoded.
    """
    channel = FolderChannel(model_folder(config.model.path), config.model.dtype)
    return channel, builtin_engine(config, device_of(config))


def device_of(config: RunConfig) -> str:
    """The device that rows are tried on: the sampler's own, or the trainer's in a server's place;
    the CPU on a host without a GPU."""
    return usable(config.trainer.device if config.is_served else config.rollout.device)


def prompts_of(config: RunConfig, encoder: PromptEncoder, rows: Sequence[Row]) -> list[Prompt]:
    """The prompt of each row's first sample."""
    seed = config.run.seed
    return [prompt_of(row, encoder, seed, group_id=str(row.number)) for row in rows]


def left_out(limits: PromptLimits, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[str]:
    """Why a run would not issue each row, or would refuse it; empty: it would issue it."""
    found = []
    for row, prompt in zip(rows, prompts, strict=True):
        try:
            why = limits.left_out(len(prompt.token_ids), row.place)
        except ConfigError as err:
            found.append(f"`up` refuses the row: {err}")
        else:
            found.append(": ".join(why) if why else "")
    return found


async def all_of(work: Iterable[Coroutine[None, None, T]], what: str, say: Say) -> list[T]:
    """Return the results of all `work`, done side by side; `say` is told how many are there.

    The first error ends the rest.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        for num_done, one in enumerate(asyncio.as_completed(tasks)):
            say(f"{what}: {num_done} of {len(tasks)}")
            await one
    return [task.result() for task in tasks]


class Trial:
    """Model and verifier, loaded.

    Args:
        note: called with what the user should know of the environment's code.
        say: called with the progress of slow work; "": it is done.

    Raises:
        EngineError: from the constructor: the model cannot be loaded or decoded.
    """

    def __init__(
        self,
        config: RunConfig,
        verifier: Verifier,
        encoder: PromptEncoder,
        note: Callable[[str], None],
        say: Say = lambda _: None,
    ) -> None:
        started_s = time.monotonic()
        self.times = Times()
        self._say = say
        self._config = config
        self._encoder = encoder
        self._channel, self._engine = loaded(config)
        self._verifier = verifier
        self._sampler = sampler_of(config, self._engine, verifier, note)
        self.times.load_s = time.monotonic() - started_s

    def run(self, rows: Sequence[Row], num_samples: int) -> list[TriedRow]:
        """Sample `num_samples` answers to each row, all together, and judge them."""
        prompts = prompts_of(self._config, self._encoder, rows)
        limits = PromptLimits.of(self._config.data, self._encoder, self._engine.max_tokens)
        reasons = left_out(limits, rows, prompts)
        started_s = time.monotonic()
        answers = asyncio.run(
            self._sample(
                [p for p, why in zip(prompts, reasons, strict=True) if not why], num_samples
            )
        )
        self.times.sample_s = time.monotonic() - started_s
        tried: list[TriedRow] = []
        for row, prompt, why in zip(rows, prompts, reasons, strict=True):
            self._say(f"judging the answers to row {len(tried) + 1} of {len(rows)}")
            found = [] if why else answers.pop(0)
            ids = prompt.token_ids.numpy().tolist()
            completions = tuple(self._judged(row, prompt, answer) for answer in found)
            tried.append(TriedRow(row=row, prompt_ids=ids, left_out=why, completions=completions))
        self._say("")
        return tried

    def close(self) -> None:
        """End the environment's processes."""
        if self._sampler.turns is not None:
            self._sampler.turns.environment.close()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._sampler.tokenizer.decode(token_ids, skip_special_tokens=False)

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
            found = await all_of(map(self._answer, samples), "sampling answers", self._say)
        finally:
            await self._engine.close()
        return [found[at : at + num_samples] for at in range(0, len(found), num_samples)]

    async def _answer(self, prompt: Prompt) -> Played | Exception:
        try:
            return await self._sampler.generate(prompt)
        except (EngineError, UserCodeError, TimeoutError) as err:  # a run sets it aside
            return err

    def _judged(self, row: Row, prompt: Prompt, answer: Played | Exception) -> Completion:
        if isinstance(answer, Exception):
            return Completion(text="", finish_reason="", rejected=str(answer))
        last, judgement, rejected = answer.last, answer.judgement, ""
        note = "" if judgement is None else "by the environment"
        started_s = time.monotonic()
        try:
            judgement = judgement or self._verifier.judge(
                AnswerToJudge(
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
