"""Rewards: the sample for a verifier, its judgement, and the check that it can be learnt from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rlstreams.workers.loop.validation import check_reward

STOP = "stop"  # finish reason of an answer that its policy ended (engines.base.FinishReason)


class RewardError(Exception):
    """No reward: the verifier raised, hung, died or returned no number; names the place."""


@dataclass(frozen=True, slots=True)
class AnswerToJudge:
    """An answer to be judged."""

    prompt: str
    completion: str  # the policy's last turn, special tokens left out
    answer: str  # of the row
    metadata: Mapping[str, Any]  # the row's free fields
    finish_reason: str = STOP  # of the last segment, a `FinishReason`
    token_ids: Sequence[int] = ()  # sampled in the last turn, the one that ends it included
    # Turns in their order, `{"author": "policy" or "environment", "text": ...}`.
    transcript: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Reward of an answer; for people its named parts, and a note with the reason."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""


def check_judgement(judged: Judgement) -> None:
    """Return if its numbers can be learnt from.

    Raises:
        ValueError: names the part and the value.
    """
    check_reward("the reward", judged.reward)
    for name, part in judged.parts.items():
        check_reward(f"part {name!r} of the reward", part)


Judge = Callable[[AnswerToJudge], Awaitable[Judgement]]


class Verifier(AbstractContextManager["Verifier"]):
    """A judge behind the rule for unfinished answers and the bound of every reward."""

    def __init__(
        self, judge: Judge, *, require_stop: bool, close: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            require_stop: an answer that its policy did not end earns 0.
            close: ends child processes; idempotent.
        """
        self._judge = judge
        self._require_stop = require_stop
        self.close = close
        self.num_open = 0
        """Samples that wait for their reward."""
        self.has_shifts = False
        """Whether the judge computes on a device that roles share, in shifts of its own."""

    @property
    def num_elsewhere(self) -> int:
        """Samples that wait for a judge with shifts of its own: no work for this process."""
        return self.num_open if self.has_shifts else 0

    @property
    def waits_for(self) -> str:
        """The same, in words; "": there are none."""
        num = self.num_elsewhere
        return f"for the judge of {num} answers, which has shifts on a device" if num else ""

    async def verify(self, sample: AnswerToJudge) -> Judgement:
        """The reward of a sample.

        Raises:
            RewardError: the verifier failed on this sample.
        """
        if self._require_stop and sample.finish_reason != STOP:
            return Judgement(reward=0.0, parts={"cut": 1.0})
        self.num_open += 1
        try:
            judged = await self._judge(sample)
        finally:
            self.num_open -= 1
        try:
            check_judgement(judged)
        except ValueError as err:
            raise RewardError(str(err)) from None
        return judged

    def judge(self, sample: AnswerToJudge) -> Judgement:
        """The same, for a thread without an event loop."""
        return asyncio.run(self.verify(sample))

    def __exit__(self, *_: object) -> None:
        self.close()
