"""Requests on their way: what was heard of each, and which version each of its tokens came from.

A server that reports spans says it itself. For others each request keeps its own account: which
weights it is sampled from, and a border wherever these change under it. Weights change in pulls
alone, while the server is paused: whatever was heard by then came from those before. So a pull that
fails before it changed anything moves no border, and one that breaks off in the middle leaves
weights that no token may come from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlstreams.workers.engines.base import GeneratedSegment
from rlstreams.workers.engines.served.answer import (
    Held,
    ModelShape,
    RequestFacts,
    UnknownVersionError,
    cut,
)
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, Span

_NOBODY = ""  # the label of weights that no version has


@dataclass(slots=True, eq=False)
class Running:
    """One request of one server."""

    sample_id: str
    request: GenerateRequest
    begun_with: Held
    labels: Mapping[str, Held]  # versions that its server was given, later ones too
    under: Held | None = field(init=False)  # what it is sampled from; None: what a broken pull left
    parts: list[Answer] = field(default_factory=list)
    num_tokens: int = 0  # received
    borders: list[Span] = field(default_factory=list)  # of versions that ended while it ran
    has_changed: bool = False  # weights did, since it began
    heard_s: float = 0.0  # monotonic; when its stream spoke last
    is_aborted: bool = False
    task: asyncio.Task[Answer] | None = None

    def __post_init__(self) -> None:
        """Nothing changed yet."""
        self.under = self.begun_with

    def hear(self, part: Answer) -> None:
        """The next piece of its stream."""
        self.parts.append(part)
        self.num_tokens += len(part.token_ids)
        self.heard_s = time.monotonic()

    async def ended(self, deadline_s: float) -> bool:
        """Whether it was answered, or broke off, within `deadline_s`."""
        assert self.task is not None, "it has not left"
        return bool((await asyncio.wait({self.task}, timeout=deadline_s))[0])

    def hang_up(self) -> None:
        """Wait for no more of its answer; nothing, if that is there."""
        if self.task is not None:
            self.task.cancel()

    def change(self, held: Held | None) -> None:
        """All that was heard so far came from the weights before, and what follows from `held`."""
        if held == self.under:
            return  # the same were put there again
        last = self._last(self.num_tokens)
        if last.end > last.start:
            self.borders.append(last)
        self.under, self.has_changed = held, True

    def segments(self, answer: Answer, shape: ModelShape) -> list[GeneratedSegment]:
        """The answer, cut by version.

        Raises:
            AnswerError: a field that cannot be, or tokens of weights that nobody can name.
            UnknownVersionError: a version that the server was not given.
        """
        if answer.finish_reason is None and not self.is_aborted:
            raise AnswerError("finish_reason is missing: the answer ended early")
        request = RequestFacts(
            num_given=len(self.request.token_ids),
            max_new_tokens=self.request.max_new_tokens,
            experts_start=self.request.experts_start,
        )
        return cut(answer, self._spans(answer), request, shape, self.labels)

    def _last(self, num_tokens: int) -> Span:
        """What came from the present weights, of so many tokens."""
        begun = self.borders[-1].end if self.borders else 0
        return Span(_NOBODY if self.under is None else self.under.label, begun, num_tokens)

    def _spans(self, answer: Answer) -> list[Span]:
        num_tokens = len(answer.token_ids)
        if answer.spans:
            return list(answer.spans)
        if num_tokens and not self.parts and self.has_changed:
            raise AnswerError("weight_versions is missing, and weights changed while it ran")
        spans = [*self.borders, self._last(num_tokens)]
        spans = [span for span in spans if span.end > span.start]
        if not spans:
            return [Span((self.under or self.begun_with).label, 0, 0)]
        for span in spans:
            if span.label == _NOBODY:
                raise AnswerError(
                    f"tokens {span.start} to {span.end} came after a pull that broke off in the "
                    "middle: no version has the weights that sampled them"
                )
        self._check_named(answer, spans[-1])
        return spans

    def _check_named(self, answer: Answer, last: Span) -> None:
        """Labels that the server names without spans: none is foreign, also of those in between."""
        named = [part.label for part in self.parts or [answer] if part.label is not None]
        foreign = next((label for label in named if label not in self.labels), None)
        if named and foreign is None and self.under is not None:
            # After the last token it may name what was put there since.
            foreign = named[-1] if named[-1] not in (last.label, self.under.label) else None
        if foreign is not None:
            raise UnknownVersionError(
                f"weight_version is {foreign!r}, but it was given {last.label!r}"
            )


class Requests:
    """Those of one server; iterated as they are at that moment."""

    def __init__(self) -> None:
        """None yet."""
        self.num_sampled = 0  # tokens received, of all that there ever were
        self._running: set[Running] = set()
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

    def cut(self) -> None:
        """Whatever they are answered with is as far as they come."""
        for running in self._running:
            running.is_aborted = True

    async def ended(self, deadline_s: float | None = None) -> None:
        """Until there are none.

        Raises:
            TimeoutError: there still are after `deadline_s`.
        """
        await asyncio.wait_for(self._idle.wait(), deadline_s)

    async def fall_silent(self, settle_s: float, deadline_s: float) -> None:
        """Until no stream has spoken for `settle_s`, counted from now.

        Raises:
            TimeoutError: one still does after `deadline_s`.
        """
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + deadline_s:
            last_s = max((running.heard_s for running in self._running), default=0.0)
            silent_s = time.monotonic() - max(last_s, begun_s)
            if silent_s >= settle_s:
                return
            await asyncio.sleep(settle_s - silent_s)
        raise TimeoutError
