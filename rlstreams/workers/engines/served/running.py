"""Requests of one server: what is sent, how an answer is cut, and how they are ended early.

An answer comes in one piece and says which version sampled each of its tokens. Where a server
cannot say that (`ServerFacts.tells_versions`), no request lives through a pull: all that was
answered came from the weights that the request began with.
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

# Bounds of an answer. A token of vLLM's is an id, a log-prob with its name, and of a retracted one
# a version's span: 150 bytes as measured here; an id of an echoed prompt has at most 8 digits and a
# comma; an expert is 4 bytes in base64, or a number of a JSON list.
ANSWER_BYTES, TOKEN_BYTES, ID_BYTES, EXPERT_BYTES = 1 << 20, 1024, 16, 8
_STILL = 3  # times that nothing was answered: what is left will not be


def room(request: SampleRequest, max_tokens: int) -> int:
    """Tokens that may still be sampled; 0 or below: none."""
    limit = min(max_tokens, request.prompt_tokens + request.sampling.max_new_tokens)
    return limit - len(request.token_ids)


def seed_of(seed: int, sample_id: str, position: int) -> int:
    """31 bits: all that every server's generator takes.

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
    """Bytes that an answer may have: what was asked for, with much room for its spelling."""
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
    label: str  # of the version that it begins with
    labels: Mapping[str, Held]  # versions that its server was given, later ones too
    facts: ServerFacts
    num_tokens: int = 0  # received
    is_whole: bool = False  # it was sampled to its end
    num_preemptions: int = 0  # other than by a pull, as far as is known
    task: asyncio.Task[Answer] | None = None

    def hang_up(self, why: str = "") -> None:
        """Wait for no more of its answer; nothing, if that is there."""
        if self.task is not None:
            self.task.cancel(why)

    def segments(self, answer: Answer, shape: ModelShape) -> list[GeneratedSegment]:
        """The answer, cut by version; raises as `cut`, and where no version is told."""
        num_tokens, label = len(answer.token_ids), self.label
        self.num_tokens = num_tokens
        self.is_whole = answer.finish_reason != FinishReason.ABORT
        self.num_preemptions = 0 if len(answer.spans or ()) > 1 else answer.num_preemptions
        if not answer.spans and num_tokens:
            if self.facts.tells_versions:
                raise AnswerError("weight_versions is missing")
            if answer.label not in (None, label):
                raise UnknownVersionError(
                    f"weight_version is {answer.label!r}, but it was given {label!r}"
                )
        spans = answer.spans or [Span(label, 0, num_tokens)]
        return cut(answer, spans, self.request, shape, self.labels)


class Requests:
    """Those of one server; iterated as they are at that moment."""

    def __init__(
        self, tell: Callable[[Running], Awaitable[bool]], settings: ServedSettings
    ) -> None:
        """Args: tell: asks the server to end a request; False: only hanging up does."""
        self.num_sampled = 0  # tokens received, of all that there ever were
        self.capacity = Capacity(settings.limit, adapts=settings.adapts)
        self._tell = tell
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
        """It leaves."""
        self._running.add(running)
        self._idle.clear()

    def end(self, running: Running) -> None:
        """It was answered, or nobody waits for it any more."""
        running.hang_up()
        self.num_sampled += running.num_tokens
        if running.is_whole:
            self.capacity.answered(len(self), running.num_preemptions)
        self._running.discard(running)
        if not self._running:
            self._idle.set()

    async def ended(self, deadline_s: float | None = None) -> None:
        """Until there are none; raises TimeoutError if there still are after `deadline_s`."""
        await asyncio.wait_for(self._idle.wait(), deadline_s)

    async def all_cut(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Until all are answered of a server that was stopped and has ended what it knew then.

        Who came in later is ended by another `stop`; but SGLang keeps such requests at its door.
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
        """Wait for no answer of any."""
        for running in self:
            running.hang_up(why)

    def leave(self, running: Running) -> None:
        """Nobody waits for it any more. Hanging up says so too, but SGLang looks for that every few
        seconds only."""
        task = asyncio.create_task(self._tell_twice(running))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Hang up on all, and tell nobody of it."""
        self.hang_up()
        await self.ended()
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _tell_twice(self, running: Running) -> None:
        with suppress(ServerError):  # then it samples to its end, for nobody
            if await self._tell(running):
                await asyncio.sleep(self._settings.again_s)  # it had not come in, perhaps
                await self._tell(running)
