"""The limits of one session, and the refusals of requests beyond them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlstreams.streams.sessions.session import Session, sampled_tokens
from rlstreams.workers.gateway.canonical import text_of
from rlstreams.workers.gateway.port import CallRefusedError, CallRequest, Message
from rlstreams.workers.model.tokenizer import Tokenizer

_CHARACTERS = 4  # of a token, in most texts
_SEAM = 64  # tokens that the beginning of a text may have alone and not in the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one start of a session's agent; answers from the log count."""

    max_calls: int
    max_tokens: int  # sampled; 0: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why the last request of a session got no answer."""

    is_limit: bool
    detail: str


class LimitError(CallRefusedError):
    """A limit of the session: the agent may end, and is judged."""

    def __init__(self, why: str, code: str = "limit_reached") -> None:
        super().__init__(400, code, why)


def check_parameters(request: CallRequest) -> None:
    """
    Raises:
        CallRefusedError: 400; a parameter that bends the distribution beyond the record, or leaves
            no room for an answer.
    """
    if request.constrained:
        raise CallRefusedError(
            400,
            "unsupported_parameter",
            f"{request.constrained} is not served: the answer would not be the policy's own",
            param=request.constrained,
        )
    if request.max_tokens is not None and request.max_tokens < 1:
        raise CallRefusedError(
            400,
            "invalid_value",
            f"max_tokens must be above 0, got {request.max_tokens}",
            param="max_tokens",
        )


def least_tokens(messages: Sequence[Message], tokenizer: Tokenizer, longest: int) -> int:
    """Tokens of these messages at least; 0: few enough to count them.

    An agent that puts a file of 8 MB into its prompt would keep the event loop, and with it all
    other sessions, for as long as its tokens take. So only the beginning is read, until it alone
    has more than `longest` tokens.
    """
    text, size = "".join(text_of(one.get("content"), "") for one in messages), _CHARACTERS * longest
    least = 0
    while least <= longest and 2 * size < len(text):
        least = len(tokenizer.encode_piece(text[:size], literal=True)) - _SEAM
        size *= 2
    return least if least > longest else 0


def too_long(num_tokens: int, longest: int, more: str = "") -> LimitError:
    """A prompt that leaves no room for an answer, in the words of OpenAI."""
    return LimitError(
        f"This model's maximum context length is {longest} tokens. However, your messages "
        f"resulted in {num_tokens} tokens{more}. Please reduce the length of the messages.",
        "context_length_exceeded",
    )


class Budget:
    """The rest of a start's limits. Calls under way count: agents ask side by side."""

    def __init__(self, limits: CallLimits, log: Session) -> None:
        self._limits = limits
        self._log = log
        self._under_way: set[Share] = set()

    @contextmanager
    def call(self) -> Iterator[Share]:
        """Room for one call, until it is in the log or has failed.

        Raises:
            LimitError: a limit is reached.
        """
        limits = self._limits
        if len(self._log.answered) + len(self._under_way) >= limits.max_calls:
            raise LimitError(f"the session made its {limits.max_calls} calls (agent.max_calls)")
        self._check_tokens()
        share = Share(self)
        self._under_way.add(share)
        try:
            yield share
        finally:
            self._under_way.remove(share)
            share.over.set_result(None)

    def _check_tokens(self) -> None:
        if self._limits.max_tokens and self._tokens_left() < 1:
            raise LimitError(
                f"the session has sampled {self._limits.max_tokens} tokens (agent.max_tokens)"
            )

    def _tokens_left(self) -> int:
        sampled = sum(sampled_tokens(node.call) for node in self._log.answered)
        return self._limits.max_tokens - sampled

    async def granted(self, wanted: int) -> int:
        """See `Share.take`."""
        if not self._limits.max_tokens:
            return wanted
        while (left := self._tokens_left()) - sum(one.tokens for one in self._under_way) < wanted:
            others = {one.over for one in self._under_way if one.tokens}
            if not others:
                break
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        self._check_tokens()
        return min(wanted, left)


class Share:
    """One call under way."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.tokens = 0  # that it may sample
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(self, wanted: int) -> int:
        """Tokens that the call may sample, `wanted` or what is left; waits while other calls may
        leave it more.

        Raises:
            LimitError: none is left.
        """
        self.tokens = await self._budget.granted(wanted)
        return self.tokens
