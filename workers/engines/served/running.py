"""Requests on their way to one server, and how they are ended early.

An answer comes in one piece and says which version sampled each of its tokens. Where a server
cannot say that (`ServerFacts.tells_versions`), no request lives through a pull: all that was
answered came from the weights that the request began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rlstreams.workers.engines.base import GeneratedSegment
from rlstreams.workers.engines.served.answer import (
    Held,
    ModelShape,
    RequestFacts,
    UnknownVersionError,
    cut,
)
from rlstreams.workers.engines.served.facts import ServerFacts
from rlstreams.workers.engines.served.http import ServerError
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, Span

_STILL = 3  # times that nothing was answered: what is left will not be


@dataclass(slots=True, eq=False)
class Running:
    """One request of one server."""

    sample_id: str
    request: GenerateRequest
    begun_with: Held
    labels: Mapping[str, Held]  # versions that its server was given, later ones too
    facts: ServerFacts
    num_tokens: int = 0  # received
    task: asyncio.Task[Answer] | None = None

    def hang_up(self) -> None:
        """Wait for no more of its answer; nothing, if that is there."""
        if self.task is not None:
            self.task.cancel()

    def segments(self, answer: Answer, shape: ModelShape) -> list[GeneratedSegment]:
        """The answer, cut by version.

        Raises:
            AnswerError: a field that cannot be, or tokens whose version is not told.
            UnknownVersionError: a version that the server was not given.
        """
        request = RequestFacts(
            num_given=len(self.request.token_ids),
            max_new_tokens=self.request.max_new_tokens,
            experts_start=self.request.experts_start,
        )
        return cut(answer, self._spans(answer), request, shape, self.labels)

    def _spans(self, answer: Answer) -> list[Span]:
        num_tokens = len(answer.token_ids)
        if answer.spans:
            return list(answer.spans)
        if num_tokens and self.facts.tells_versions:
            raise AnswerError("weight_versions is missing")
        label = self.begun_with.label
        if answer.label not in (None, label) and num_tokens:
            raise UnknownVersionError(
                f"weight_version is {answer.label!r}, but it was given {label!r}"
            )
        return [Span(label, 0, num_tokens)]


class Requests:
    """Those of one server; iterated as they are at that moment."""

    def __init__(
        self, tell: Callable[[Running], Awaitable[bool]], settings: ServedSettings
    ) -> None:
        """None yet.

        Args:
            tell: asks the server to end a request; False: there is no way to but hanging up.
        """
        self.num_sampled = 0  # tokens received, of all that there ever were
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
        self._running.discard(running)
        if not self._running:
            self._idle.set()

    async def ended(self, deadline_s: float | None = None) -> None:
        """Until there are none.

        Raises:
            TimeoutError: there still are after `deadline_s`.
        """
        await asyncio.wait_for(self._idle.wait(), deadline_s)

    async def all_cut(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Until all are answered of a server that was stopped and has ended what it knew then.

        Who came in later is ended by stopping it again; but SGLang keeps such requests at its door.

        Args:
            stop: ends what the server knows.
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

    def hang_up(self) -> None:
        """Wait for no answer of any."""
        for running in self:
            running.hang_up()

    def leave(self, running: Running) -> None:
        """Nobody waits for it any more. Hanging up says so too, but SGLang looks for that every few
        seconds, and a router may keep it to itself."""
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
