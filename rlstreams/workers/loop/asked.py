"""Records that a coroutine on another thread waits to see committed: it asks, the loop takes.

What is asked for while a transaction is under way shares the next one. Nobody who asked hears of an
abort, for the loop sends it again; of an unknown outcome nobody hears either: the process ends.
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

AGAIN_S = 0.002  # before what cannot be made yet is tried again
Make = Callable[[], Sequence[Outgoing] | None]


@dataclass(frozen=True, slots=True)
class _Question:
    raw: RawRecord
    make: Make
    is_progress: bool
    answer: Future[None] = field(default_factory=Future)


class Asked:
    """What was asked for and not taken yet."""

    def __init__(self) -> None:
        self._new: SimpleQueue[_Question] = SimpleQueue()
        self._kept: list[_Question] = []  # that cannot be made yet
        self._woken = threading.Event()

    async def committed(self, raw: RawRecord, make: Make, *, is_progress: bool = True) -> None:
        """Return once the records are committed; whoever is cancelled before they are taken asks
        for nothing.

        Args:
            raw: the input that they belong to.
            make: the records, made on the role's thread; None: not yet, ask again in a moment.
            is_progress: whether this is work that nobody does again.
        """
        question = _Question(raw, make, is_progress)
        self._new.put(question)
        self._woken.set()
        await asyncio.wrap_future(question.answer)

    def note(self, raw: RawRecord, *records: Outgoing, is_progress: bool = False) -> None:
        """Have records committed before all that is asked for from now on; nobody waits.

        Without any it says that work of this input came forward, which nobody does again.
        """
        self._new.put(_Question(raw, lambda: records, is_progress))
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Until something is asked for, or the time is over."""
        self._woken.wait(min(timeout_s, AGAIN_S) if self._kept else timeout_s)
        self._woken.clear()

    def take(self) -> list[Awaited]:
        """What can be made by now, in the order in which it was asked for."""
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
