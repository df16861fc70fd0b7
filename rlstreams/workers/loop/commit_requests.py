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
class _Request:
    raw: RawRecord
    make: Make
    is_progress: bool
    done: Future[None] = field(default_factory=Future)


class CommitRequests:
    """Requests that the loop has not taken yet."""

    def __init__(self) -> None:
        self._new: SimpleQueue[_Request] = SimpleQueue()
        self._kept: list[_Request] = []  # whose records cannot be made yet
        self._woken = threading.Event()

    async def committed(self, raw: RawRecord, make: Make, *, is_progress: bool = True) -> None:
        """Return once the records are committed; cancelled before they are taken, it asks for none.

        Args:
            raw: the input that they belong to.
            make: makes the records, on the role's thread; None: not yet, ask again in a moment.
            is_progress: whether they are work that no other worker does again.
        """
        request = _Request(raw, make, is_progress)
        self._new.put(request)
        self._woken.set()
        await asyncio.wrap_future(request.done)

    def note(self, raw: RawRecord, *records: Outgoing, is_progress: bool = False) -> None:
        """Have records committed before all later requests, without waiting.

        Without records it notes progress on this input: work that no other worker does again.
        """
        self._new.put(_Request(raw, lambda: records, is_progress))
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a request, or the time is over."""
        self._woken.wait(min(timeout_s, AGAIN_S) if self._kept else timeout_s)
        self._woken.clear()

    def take(self) -> list[Awaited]:
        """Requests whose records can be made by now, in order."""
        requests, self._kept = self._kept, []
        while not self._new.empty():
            requests.append(self._new.get())
        found = []
        for request in requests:
            if request.done.cancelled():
                continue
            outputs = request.make()
            if outputs is None:
                self._kept.append(request)
            elif request.done.set_running_or_notify_cancel():
                found.append(
                    Awaited(
                        raw=request.raw,
                        outputs=tuple(outputs),
                        committed=partial(request.done.set_result, None),
                        is_progress=request.is_progress,
                    )
                )
        return found
