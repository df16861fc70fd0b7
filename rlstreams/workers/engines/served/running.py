"""Requests of one server: sending, cutting an answer by version, and ending early.

An answer comes in one piece and gives the version of each of its tokens. Where a server cannot give
it (`ServerFacts.reports_versions`), no request lives through a pull: all tokens of an answer came
from the weights that the request began with.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment, Held, SampleRequest
from rlstreams.workers.engines.served.answer import UnknownVersionError, cut
from rlstreams.workers.engines.served.capacity import Capacity
from rlstreams.workers.engines.served.facts import ServerFacts
from rlstreams.workers.engines.served.http import ServerError
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.shape import ModelShape
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, Span

# Bounds of an answer. A token of vLLM's is an id, a log-prob with its name, and after a retraction
# a version's span: 150 bytes as measured here; an id of an echoed prompt has at most 8 digits and a
# comma; an expert is 4 bytes in base64, or a number of a JSON list.
ANSWER_BYTES, TOKEN_BYTES, ID_BYTES, EXPERT_BYTES = 1 << 20, 1024, 16, 8
_STILL = 3  # rounds without an answer, after which no answer is expected


def room(request: SampleRequest, max_tokens: int) -> int:
    """Tokens that may still be sampled; 0 or below: none."""
    limit = min(max_tokens, request.prompt_tokens + request.sampling.max_new_tokens)
    return limit - len(request.token_ids)


def seed_of(seed: int, sample_id: str, position: int) -> int:
    """A seed of 31 bits, the most that every server's generator takes.

    A resumed sample gets a seed of its own position: the server starts its generator anew, and the
    numbers that drew the first tokens must not draw the later ones too.
    """
    key = f"{seed}/{sample_id}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


def generate_request(
    request: SampleRequest,
    settings: ServedSettings,
    shape: ModelShape,
    max_tokens: int,
    salt: str,
) -> GenerateRequest:
    """The request that continues `request.token_ids`."""
    num_tokens = len(request.token_ids)
    sampling = request.sampling
    is_resumed = num_tokens > request.prompt_tokens
    wants_experts = settings.capture_experts and shape.num_experts > 0
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        token_ids=request.token_ids.tolist(),
        max_new_tokens=room(request, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed_of(request.seed, request.sample_id, num_tokens),
        stop_token_ids=sorted(shape.eos_ids),
        experts_start=(num_tokens - 1 if is_resumed else 0) if wants_experts else None,
        salt=salt,
    )


def longest_answer(request: GenerateRequest, shape: ModelShape) -> int:
    """Most bytes that an answer may have: its tokens, with room for their spelling."""
    num_tokens = request.max_new_tokens
    rows = 0
    if request.experts_start is not None:
        rows = max(0, len(request.token_ids) + num_tokens - request.experts_start)
    experts = rows * shape.num_layers * max(1, shape.top_k) * EXPERT_BYTES
    return ANSWER_BYTES + num_tokens * TOKEN_BYTES + len(request.token_ids) * ID_BYTES + experts


@dataclass(slots=True, eq=False)
class Running:
    """One request of one server."""

    sample_id: str
    request: GenerateRequest
    label: str  # of the version under which it began
    labels: Mapping[str, Held]  # versions that its server was given, later ones too
    facts: ServerFacts
    num_tokens: int = 0  # received
    is_whole: bool = False  # whether it was sampled to its end
    num_preemptions: int = 0  # known preemptions, other than by a pull
    task: asyncio.Task[Answer] | None = None

    def hang_up(self, why: str = "") -> None:
        """Stop waiting for its answer; no effect if the answer is there."""
        if self.task is not None:
            self.task.cancel(why)

    def segments(self, answer: Answer, shape: ModelShape) -> list[GeneratedSegment]:
        """The answer, cut by version; raises as `cut`, and if a version is missing."""
        num_tokens, label = len(answer.token_ids), self.label
        self.num_tokens = num_tokens
        self.is_whole = answer.finish_reason != FinishReason.ABORT
        self.num_preemptions = 0 if len(answer.spans or ()) > 1 else answer.num_preemptions
        if not answer.spans and num_tokens:
            if self.facts.reports_versions:
                raise AnswerError("weight_versions is missing")
            if answer.label not in (None, label):
                raise UnknownVersionError(
                    f"weight_version is {answer.label!r}, but it was given {label!r}"
                )
        spans = answer.spans or [Span(label, 0, num_tokens)]
        return cut(answer, spans, self.request, shape, self.labels)


class Requests:
    """Requests of one server; iteration takes a copy."""

    def __init__(
        self, abort: Callable[[Running], Awaitable[bool]], settings: ServedSettings
    ) -> None:
        """Args: abort: asks the server to end a request; False: only hanging up does."""
        self.num_sampled = 0  # tokens received, of all requests so far
        self.capacity = Capacity(settings.limit, adapts=settings.adapts)
        self._abort = abort
        self._settings = settings
        self._running: set[Running] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._running))

    def begin(self, running: Running) -> None:
        """Count a request in as it is sent."""
        self._running.add(running)
        self._idle.clear()

    def end(self, running: Running) -> None:
        """Count a request out: it was answered, or its caller no longer waits for it."""
        running.hang_up()
        self.num_sampled += running.num_tokens
        if running.is_whole:
            self.capacity.answered(len(self), running.num_preemptions)
        self._running.discard(running)
        if not self._running:
            self._idle.set()

    async def ended(self, deadline_s: float | None = None) -> None:
        """Wait until no request is left; raises TimeoutError after `deadline_s`."""
        await asyncio.wait_for(self._idle.wait(), deadline_s)

    async def all_cut(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Wait until all requests are answered, after the server was stopped and ended those it
        knew.

        Each further `stop` ends requests that arrived later; but SGLang keeps such requests unread.
        """
        num_still = 0
        while (num_left := len(self)) and num_still < _STILL:
            with suppress(TimeoutError):
                await self.ended(self._settings.again_s)
                return
            num_still = num_still + 1 if len(self) == num_left else 0
            await stop()
        self.hang_up()
        await self.ended()

    def hang_up(self, why: str = "") -> None:
        """Stop waiting for the answers of all requests."""
        for running in self:
            running.hang_up(why)

    def leave(self, running: Running) -> None:
        """Abort a request that no caller waits for. The server would also notice that the
        connection is closed, but SGLang looks for that only every few seconds."""
        task = asyncio.create_task(self._abort_twice(running))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Hang up on all requests, without a message to the server."""
        self.hang_up()
        await self.ended()
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _abort_twice(self, running: Running) -> None:
        with suppress(ServerError):  # then it samples to its end in vain
            if await self._abort(running):
                await asyncio.sleep(self._settings.again_s)  # perhaps it had not arrived yet
                await self._abort(running)
