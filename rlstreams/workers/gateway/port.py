"""The ports between the dialects, the messages' renderer and the sessions of a gateway.

A dialect turns HTTP into a `CallRequest` and a `CallAnswer` into HTTP. `Calls` answers requests:
it finds the session, replays or samples, commits, and only then returns. `Renderer` is between
messages and token ids. None of them knows how another does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""As chat completions write it: role, content, tool_calls, tool_call_id, reasoning_content."""
Tool = Mapping[str, Any]
"""As chat completions write it: `{"type": "function", "function": {...}}`."""


class CallRefusedError(Exception):
    """A request that is not answered; each dialect writes it in its own shape.

    Args:
        status: of HTTP. 409 is never used: clients try it again.
        code: a stable word, as `context_length_exceeded`.
        param: the field of the request; "": none.
        retry_after_s: when it may be tried again; None: never.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s


ENDING_S = 5.0  # until a worker that ends is back, or another one has its sessions


def ending(why: str = "") -> CallRefusedError:
    """The refusal 503 of a worker that takes no more requests: the next one answers a retry."""
    why_not = "this worker ends; its sessions go on in the next one" + (f": {why}" if why else "")
    return CallRefusedError(503, "ending", why_not, retry_after_s=ENDING_S)


MOVING_S = 1.0  # until a request for a session between two workers may be sent again


def moving() -> CallRefusedError:
    """The refusal 503 of a session that went away from here, and is open nowhere yet."""
    why = "the session is on its way to another worker, which answers soon"
    return CallRefusedError(503, "moving", why, retry_after_s=MOVING_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One request for one answer, the same in every dialect."""

    dialect: str  # "chat", "responses", "messages"
    body: bytes  # as it came
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None  # of the answer
    stop: tuple[str, ...] = ()
    requested: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, seed, ...
    constrained: str = (
        ""  # what asks for more than the model's distribution: "grammar", "logit_bias"
    )
    retry: int | None = None  # number of the client's try, from 0; None: its client does not count
    idempotency_key: str = ""  # the client's name for it, the same in each try; "": it has none
    choice: int = 0  # of `n` alike ones, from 0: part of the request's hash
    model: str = ""  # the name that it asks for; all are the policy
    is_trained: bool = True  # False: its client marked it as beside the task


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool that the policy wrote."""

    id: str  # derived from the call's id: the same in a replay
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """An answer, parsed from sampled ids."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """A call that is committed."""

    call_id: str
    created_s: int  # of the first answer: the same in a replay
    parsed: Parsed
    finish_reason: str  # "stop", "length", "tool_calls"
    prompt_tokens: int
    tokens: tuple[str, ...]  # text of each sampled token
    logprobs: tuple[float, ...]  # nats, of each
    stopped_by: str = ""  # the stop string of the request that ended it
    overruled: Mapping[str, Any] = field(default_factory=dict)  # by parameter, as requested
    is_replayed: bool = False
    is_trained: bool = True  # False: it is auxiliary, and never learnt from


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An outcome as a client posts it."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    call_id: str | None = None
    supersedes: str | None = None
    outcome_id: str = ""  # "": derived from the rest, so that a repeat is the same


class Calls(Protocol):
    """The sessions behind a gateway; its methods run on the gateway's event loop.

    Each raises `CallRefusedError`: 401 for a key that is none of ours, 410 for a closed session,
    429 with a time where there is no room, 400 for what the model cannot take, 503 while it is
    ending.
    """

    @property
    def model(self) -> str:
        """The name that it is served under."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer, in tokens."""

    def check(self, key: str) -> None:
        """Raise the 401 of all others unless `key` is one of ours; called before a body is read."""

    async def beat(self, key: str) -> None:
        """Take a sign of life, as each of the others is: the session is being worked on."""

    async def call(self, key: str, request: CallRequest) -> CallAnswer:
        """Sample or replay. Cancelled: its client hung up, which ends nothing; a retry gets the
        same answer.

        A request that equals one under way is the same call, unless somebody waits for the other
        and its client counts its tries and says that this is the first, or names the two by
        different keys: both are sampled side by side then.
        """

    async def report(self, key: str, report: Report) -> str:
        """Write an outcome of the session; returns its id once it is committed."""

    async def close(self, key: str, kind: str, detail: str) -> None:
        """Say that the session is over, as the agent sees it; idempotent."""

    def count_tokens(
        self, key: str, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> int:
        """Number of tokens of the prompt that these would make; nothing is recorded. It may be too
        small for a prompt beyond `max_model_len`, but is beyond that, too."""


class Desk(Protocol):
    """Gives sessions to the runners and clients that ask; on the gateway's event loop."""

    def check(self, key: str) -> None:
        """
        Raises:
            CallRefusedError: 401; `key` is no runner's.
        """

    async def ask(
        self, key: str, wait_s: float, client_group: str = ""
    ) -> Mapping[str, Any] | None:
        """One start of a session, for this caller alone, as JSON; None: there was none within
        `wait_s`. Cancelled, it takes none.

        Args:
            client_group: of a client from outside: its session is compared with those of the group.

        Raises:
            CallRefusedError: 401; 400 for a group that cannot be; 429 where too many wait already;
                503 while it is ending.
        """


class Renderer(Protocol):
    """Between messages and ids, for one model family. Pure; sampled ids are never made anew."""

    @property
    def name(self) -> str:
        """Name, version and settings of the renderer; recorded."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The prompt of a dialogue, ready for its answer.

        Raises:
            CallRefusedError: 400; a role, a tool or a content part that the template cannot take.
        """

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """The ids between an answer and the next: those *after* `prompt_ids` and
        `sampled_ids`; None where it cannot be proven that the dialogue continues with just these.
        """

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: Sequence[int] = (),
        call_id: str = "",
    ) -> Parsed:
        """Parse an answer; a failed attempt at a tool's call is content."""


def url_of(host: str, port: int) -> str:
    """Address of a gateway, as clients write it; without a path."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
