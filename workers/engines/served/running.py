"""Requests on their way: what was heard of each, and which version each of its tokens came from.

A server that reports spans says it itself. For others the pauses of our pulls are the borders:
whatever was heard until the server fell silent belongs to the version before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from workers.engines.base import GeneratedSegment
from workers.engines.served.answer import Asked, Held, ModelShape, UnknownVersionError, cut
from workers.engines.served.wire import Answer, AnswerError, Span, Wanted


@dataclass(slots=True, eq=False)
class Running:
    """One request of one server."""

    sample_id: str
    wanted: Wanted
    begun_with: Held
    parts: list[Answer] = field(default_factory=list)
    num_tokens: int = 0  # received
    borders: list[Span] = field(default_factory=list)  # of versions that ended while it ran
    heard_s: float = 0.0  # monotonic; when its stream spoke last
    is_aborted: bool = False
    task: asyncio.Task[Answer] | None = None

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

    def end_version(self, held: Held | None) -> None:
        """All that was heard so far, and is behind no border yet, came from `held`."""
        begun = self.borders[-1].end if self.borders else 0
        label = (held or self.begun_with).label
        if self.num_tokens > begun:
            self.borders.append(Span(label, begun, self.num_tokens))

    def segments(
        self, answer: Answer, held: Held | None, labels: Mapping[str, Held], shape: ModelShape
    ) -> list[GeneratedSegment]:
        """The answer, cut by version.

        Args:
            held: what the server holds now; None after a pull that broke off.
            labels: the versions that it was given.

        Raises:
            AnswerError: a field that cannot be.
            UnknownVersionError: a version that the server was not given.
        """
        if answer.finish_reason is None and not self.is_aborted:
            raise AnswerError("finish_reason is missing: the answer ended early")
        asked = Asked(
            num_given=len(self.wanted.token_ids),
            max_new_tokens=self.wanted.max_new_tokens,
            experts_start=self.wanted.experts_start,
        )
        return cut(answer, self._spans(answer, held, labels), asked, shape, labels)

    def _spans(self, answer: Answer, held: Held | None, labels: Mapping[str, Held]) -> list[Span]:
        num_tokens = len(answer.token_ids)
        if answer.spans:
            return list(answer.spans)
        last = held or self.begun_with
        if num_tokens and not self.parts and last != self.begun_with:
            raise AnswerError("weight_versions is missing, and weights changed while it ran")
        if self.borders and held is None:
            last = labels[self.borders[-1].label]  # cut at the pause of a pull that failed
        if answer.label is not None and answer.label != last.label:
            raise UnknownVersionError(
                f"weight_version is {answer.label!r}, but it was given {last.label!r}"
            )
        begun = self.borders[-1].end if self.borders else 0
        return [*self.borders, Span(last.label, begun, num_tokens)]


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
