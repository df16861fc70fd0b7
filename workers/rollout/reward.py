"""Judge an answer: built-in verifiers, and a user's function in processes of its own.

`judge` may be called from any thread. Built-ins take microseconds; a user's function takes up to
`reward.timeout_s`, so call it from a thread pool, never from an event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from streams.errors import ConfigError

if TYPE_CHECKING:
    from workers.config_reward import RewardSection

STOP = "stop"  # finish reason of an answer that its policy ended (engines.base.FinishReason)
Metadata = Mapping[str, Any]

# A sign counts only where no number stands before it: the last number of "10-3" is 3.
_NUMBER = re.compile(r"(?:(?<![0-9.])[-+])?(?:[0-9]+(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)")


class RewardError(Exception):
    """No judgement: the verifier raised, hung, died or returned no number; names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an answer earned, and named parts of it for people."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Judges answers; thread-safe."""

    def judge(
        self, prompt: str, completion: str, answer: str, metadata: Metadata, finish_reason: str
    ) -> Judgement:
        """The reward of `completion`.

        Args:
            prompt: the prompt as text.
            completion: what the policy wrote, special tokens left out.
            answer: the row's `answer`.
            metadata: the row's free fields.
            finish_reason: of the last segment, a `FinishReason`.

        Raises:
            RewardError: the verifier failed on this answer.
        """

    def close(self) -> None:
        """End child processes; idempotent."""

    def __enter__(self) -> Self:
        """Itself."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""


class Judge(Protocol):
    """What gives the reward of a whole answer."""

    def __call__(self, prompt: str, completion: str, answer: str, metadata: Metadata) -> Judgement:
        """See `Verifier.judge`."""


def exact(prompt: str, completion: str, answer: str, metadata: Metadata) -> Judgement:
    """1 if completion and answer are equal but for white space around them."""
    del prompt, metadata
    return Judgement(reward=float(completion.strip() == answer.strip()))


def numeric(prompt: str, completion: str, answer: str, metadata: Metadata) -> Judgement:
    """1 if the completion's last number equals the answer; commas separate numbers.

    Raises:
        RewardError: the answer is not a number.
    """
    del prompt, metadata
    try:
        wanted = Decimal(answer.strip())
    except InvalidOperation:
        wanted = Decimal("NaN")
    if not wanted.is_finite():
        raise RewardError(f"verifier numeric: the row's answer {answer!r} is not a number")
    numbers = _NUMBER.findall(completion)
    return Judgement(reward=float(bool(numbers) and Decimal(numbers[-1]) == wanted))


BUILT_IN: dict[str, Judge] = {"exact": exact, "numeric": numeric}


class RuleVerifier:
    """A judge behind the rule for unfinished answers."""

    def __init__(
        self, judge: Judge, *, require_stop: bool, close: Callable[[], None] = lambda: None
    ) -> None:
        self._judge = judge
        self._require_stop = require_stop
        self._close = close

    def judge(
        self, prompt: str, completion: str, answer: str, metadata: Metadata, finish_reason: str
    ) -> Judgement:
        """See `Verifier.judge`."""
        if self._require_stop and finish_reason != STOP:
            return Judgement(reward=0.0, parts={"cut": 1.0})
        return self._judge(prompt, completion, answer, metadata)

    def close(self) -> None:
        """See `Verifier.close`."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def make_verifier(section: RewardSection) -> Verifier:
    """The verifier that the configuration names, ready to judge.

    Raises:
        ConfigError: an unknown name, or a file or function that cannot be loaded.
    """
    if section.verifier in BUILT_IN:
        return RuleVerifier(BUILT_IN[section.verifier], require_stop=section.require_stop)
    file, colon, function = section.verifier.rpartition(":")
    if not colon or not file or not function:
        raise ConfigError(
            f"reward.verifier must be one of {', '.join(BUILT_IN)} or `file.py:function`, "
            f"got {section.verifier!r}"
        )
    from workers.rollout.user_verifier import UserVerifier

    user = UserVerifier(file, function, section.timeout_s)
    return RuleVerifier(user, require_stop=section.require_stop, close=user.close)
