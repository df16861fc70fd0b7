"""Requests to commit records, made by a coroutine on another thread: it waits, the loop commits.

Requests during a transaction share the next one. A requester does not learn of an abort, because
the loop sends it again; nor of an unknown outcome, which ends the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from rlstreams.streams.log.record import Outgoing, RawRecord
from rlstreams.workers.loop.pending import Awaited

AGAIN_S = 0.002  # before records that could not be made yet are tried again
Make = Callable[[], Sequence[Outgoing] | None]


@dataclass(frozen=True, slots=True)
class _Question:
    raw: RawRecord
    make: Make
    is_progress: bool
    answer: Future[None] = field(default_factory=Future)


class Asked:
    """Requests that the loop has not taken yet."""

    def __init__(self) -> None:
        self._new: SimpleQueue[_Question] = SimpleQueue()
        self._kept: list[_Question] = []  # whose records cannot be made yet
        self._woken = threading.Event()

    async def committed(self, raw: RawRecord, make: Make, *, is_progress: bool = True) -> None:
        """Return once the records are committed; cancelled before they are taken, it asks for none.

        Args:
            raw: the input that they belong to.
            make: makes the records, on the role's thread; None: not yet, ask again in a moment.
            is_progress: whether they are work that no other worker does again.
        """
        question = _Question(raw, make, is_progress)
        self._new.put(question)
        self._woken.set()
        await asyncio.wrap_future(question.answer)

    def note(self, raw: RawRecord, *records: Outgoing, is_progress: bool = False) -> None:
        """Have records committed before all later requests, without waiting.

        Without records it notes that work on this input came forward, which no other worker does
        again.
        """
        self._new.put(_Question(raw, lambda: records, is_progress))
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a request, or the time is over."""
        self._woken.wait(min(timeout_s, AGAIN_S) if self._kept else timeout_s)
        self._woken.clear()

    def take(self) -> list[Awaited]:
        """Requests whose records can be made by now, in order."""
        asked, self._kept = self._kept, []
        while not self._new.empty():
            asked.append(self._new.get())
        found = []
        for question in asked:
            if question.answer.cancelled():
                continue
            outputs = question.make()
            if outputs is None:
                self._kept.append(question)
            elif question.answer.set_running_or_notify_cancel():
                found.append(
                    Awaited(
                        raw=question.raw,
                        outputs=tuple(outputs),
                        committed=partial(question.answer.set_result, None),
                        is_progress=question.is_progress,
                    )
                )
        return found
