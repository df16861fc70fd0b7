"""The limits of one session, and the refusals of requests beyond them."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.workers.gateway.port import CallRefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one session."""

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


def too_long(num_tokens: int, longest: int) -> LimitError:
    """A prompt that leaves no room for an answer, in the words of OpenAI."""
    return LimitError(
        f"This model's maximum context length is {longest} tokens. However, your messages "
        f"resulted in {num_tokens} tokens. Please reduce the length of the messages.",
        "context_length_exceeded",
    )
