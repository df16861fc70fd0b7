"""The verifier interface, used by rollout workers, `try` and `doctor`.

`judge` may be called from any thread. One that `waits` takes up to `reward.timeout_s` a try:
call it from a thread pool, never from an event loop. `make_verifier` is in `make_verifier.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from rlstreams.workers.loop.validation import check_reward

STOP = "stop"  # finish reason of an answer that its policy ended (engines.base.FinishReason)
Metadata = Mapping[str, Any]
# Turns in their order, `{"author": "policy" or "environment", "text": ...}`; a lone answer is one.
Transcript = Sequence[Mapping[str, str]]


class RewardError(Exception):
    """No judgement: the verifier raised, hung, died or returned no number; names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an answer earned, and named parts of it for people."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended, and its tokens; none where it was not sampled."""

    finish_reason: str  # of the last segment, a `FinishReason`
    token_ids: Sequence[int] = ()
    transcript: Transcript = ()


class Verifier(Protocol):
    """Judges answers; thread-safe."""

    @property
    def waits(self) -> bool:
        """Whether a judgement waits for another process, instead of taking microseconds."""

    def judge(
        self,
        prompt: str,
        completion: str,
        answer: str,
        metadata: Metadata,
        finish_reason: str,
        token_ids: Sequence[int] = (),
        transcript: Transcript = (),
    ) -> Judgement:
        """The reward of `completion`.

        Args:
            prompt: the prompt as text.
            completion: what the policy wrote in its last turn, special tokens left out.
            answer: the row's `answer`.
            metadata: the row's free fields.
            finish_reason: of the last segment, a `FinishReason`.
            token_ids: that were sampled in that turn, the one that ends it included.
            transcript: all turns.

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


def check_judgement(judged: Judgement) -> None:
    """Return if its numbers can be learnt from.

    Raises:
        ValueError: names the part and the value.
    """
    check_reward("the reward", judged.reward)
    for name, part in judged.parts.items():
        check_reward(f"part {name!r} of the reward", part)


# Gives the reward of a whole answer: (prompt, completion, answer, metadata, ending).
Judge = Callable[..., Judgement]


class RuleVerifier:
    """A judge behind the rule for unfinished answers and the bound of every reward."""

    def __init__(
        self,
        judge: Judge,
        *,
        require_stop: bool,
        waits: bool,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.waits = waits
        self._judge = judge
        self._require_stop = require_stop
        self._close = close

    def judge(
        self,
        prompt: str,
        completion: str,
        answer: str,
        metadata: Metadata,
        finish_reason: str,
        token_ids: Sequence[int] = (),
        transcript: Transcript = (),
    ) -> Judgement:
        """See `Verifier.judge`."""
        if self._require_stop and finish_reason != STOP:
            return Judgement(reward=0.0, parts={"cut": 1.0})
        ending = Ending(finish_reason=finish_reason, token_ids=token_ids, transcript=transcript)
        judged = self._judge(prompt, completion, answer, metadata, ending)
        try:
            check_judgement(judged)
        except ValueError as err:
            raise RewardError(str(err)) from None
        return judged

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
