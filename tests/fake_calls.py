"""`Calls` in memory, over no engine: it keeps to the contract of the port."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rlstreams.workers.gateway.canonical import Matcher, call_id
from rlstreams.workers.gateway.equals import AskedCall, EqualCalls
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.port import (
    CallAnswer,
    CallRefusedError,
    CallRequest,
    Message,
    Parsed,
    Report,
    Tool,
)

CREATED_S = 1_700_000_000
Says = Callable[[CallRequest], Parsed | CallAnswer]


def echo(request: CallRequest) -> Parsed:
    """The last message's text, after a colon."""
    return Parsed(content=f"said: {request.messages[-1]['content']}")


class FakeCalls:
    """A session's calls: a repeat of one under way, or a marked retry, is the same call."""

    model = "fake"
    max_model_len = 1000

    def __init__(self, keys: Keys, says: Says = echo) -> None:
        self.says = says
        self.requests: list[CallRequest] = []  # that were sampled
        self.reports: list[Report] = []
        self.closed: dict[str, tuple[str, str]] = {}
        self.gate = asyncio.Event()  # closed: every call waits
        self.gate.set()
        self._keys = keys
        self._equals: defaultdict[tuple[str, int, str], EqualCalls] = defaultdict(EqualCalls)
        self._answers: dict[tuple[str, str, int], CallAnswer] = {}

    def check(self, key: str) -> None:
        """See Calls."""
        self._keys.read(key)

    async def beat(self, key: str) -> None:
        """See Calls."""
        self._open(key)

    async def call(self, key: str, request: CallRequest) -> CallAnswer:
        """See Calls."""
        session, start = self._open(key)
        if request.constrained:
            raise CallRefusedError(
                400, "unsupported_parameter", f"{request.constrained} is not trained on",
                param=request.constrained,
            )  # fmt: skip
        if self._length(request.messages) >= self.max_model_len:
            raise CallRefusedError(400, "context_length_exceeded", "no room", param="messages")
        hashed = Matcher().request_hash(request)
        equal = self._equals[session, start, hashed]
        one = equal.found(request)
        if one is None:
            answered = {one.occurrence for one in equal.calls if one.answer is not None}
            one = equal.begin(request, answered)
            one.work = asyncio.ensure_future(self._answered(session, hashed, request, one))
            one.work.add_done_callback(partial(self._is_done, equal, one))
        one.tried = max(one.tried, request.retry or 0)
        one.num_listening += 1
        try:
            is_known = one.answer is not None
            answer = await asyncio.shield(one.work)
            one.is_heard = True
            return replace(answer, is_replayed=answer.is_replayed or is_known)
        finally:
            one.num_listening -= 1

    def _is_done(self, equal: EqualCalls, one: AskedCall, work: asyncio.Task[CallAnswer]) -> None:
        if work.cancelled() or work.exception() is not None:
            equal.refuse(one)

    async def _answered(
        self, session: str, hashed: str, request: CallRequest, one: AskedCall
    ) -> CallAnswer:
        known = self._answers.get((session, hashed, one.occurrence))
        if known is None:
            one.answer = await self._sampled(session, hashed, one.occurrence, request)
        else:
            one.answer = replace(known, is_replayed=True)
        return one.answer

    async def _sampled(
        self, session: str, hashed: str, occurrence: int, request: CallRequest
    ) -> CallAnswer:
        self.requests.append(request)
        await self.gate.wait()
        said = self.says(request)
        if isinstance(said, Parsed):
            tokens = tuple(said.content.split()) or ("<eos>",)
            said = CallAnswer(
                call_id=call_id(session, hashed, occurrence),
                created_s=CREATED_S,
                parsed=said,
                finish_reason="tool_calls" if said.tool_calls else "stop",
                prompt_tokens=self._length(request.messages),
                tokens=tokens,
                logprobs=tuple(-0.5 for _ in tokens),
                overruled=dict(request.requested),
                is_trained=request.is_trained,
            )
        self._answers[session, hashed, occurrence] = said
        return said

    async def report(self, key: str, report: Report) -> str:
        """See Calls."""
        self._keys.read(key)
        self.reports.append(report)
        return report.outcome_id or hashlib.sha256(repr(report).encode()).hexdigest()[:32]

    async def close(self, key: str, kind: str, detail: str) -> None:
        """See Calls."""
        self.closed.setdefault(self._keys.read(key).session_id, (kind, detail))

    def count_tokens(
        self, key: str, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> int:
        """See Calls."""
        self._open(key)
        return self._length(messages) + len(tools)

    def _open(self, key: str) -> tuple[str, int]:
        read = self._keys.read(key)
        if read.session_id in self.closed:
            raise CallRefusedError(410, "session_closed", f"session {read.session_id} is closed")
        return read.session_id, read.start

    def _length(self, messages: Sequence[Message]) -> int:
        """Words of all texts."""
        return sum(len(str(message["content"]).split()) for message in messages)
