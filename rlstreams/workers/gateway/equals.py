"""Equal requests of one start of an agent: which call each of them is.

An equal request asks for another answer, or its client sends again what it asked before. These
facts tell one from the other, the first that applies:

- its `Idempotency-Key`: with the same one it is the same call, with another it is another;
- an equal call whose answer nobody waits for and nobody had: the request is that call;
- the number of its try. A first one is a call of its own. A later one is a new call where a try
  before it was refused, else an equal call whose first try came here: the oldest under way, or the
  last that was answered;
- a client that counts nothing asks nothing twice side by side: it is the call under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass, field

from rlstreams.workers.gateway.port import CallAnswer, CallRequest


@dataclass(slots=True, kw_only=True, eq=False)
class AskedCall:
    """A call that this start asked for; under way until it has its answer."""

    occurrence: int  # of its request
    key: str  # by which its client names it; "": it has no name
    began_here: bool  # with its client's first try
    tried: int  # number of the newest try that is this call
    work: asyncio.Task[CallAnswer] | None = None
    answer: CallAnswer | None = None
    num_listening: int = 0  # clients that wait for the answer
    is_heard: bool = False  # some client waits while it is written, or was given it later
    has_place: bool = False  # in the engine
    is_written: bool = False  # its record is in the log, or on its way

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for its answer, and nobody had it."""
        return not (self.num_listening or (self.answer and self.is_heard))


@dataclass(slots=True)
class EqualCalls:
    """Calls of one start with one request hash, in the order in which they were asked for."""

    calls: list[AskedCall] = field(default_factory=list)
    _refused: list[int] = field(default_factory=list)  # numbers of tries that nobody sent again yet

    @property
    def under_way(self) -> list[AskedCall]:
        """Calls without an answer."""
        return [one for one in self.calls if one.answer is None]

    def found(self, request: CallRequest) -> AskedCall | None:
        """The call that a request is; None: it is a new one."""
        if key := request.idempotency_key:
            return next((one for one in self.calls if one.key == key), None)
        unnamed = [one for one in self.calls if not one.key]
        if left := [one for one in unnamed if one.is_left]:
            return left[0]
        under_way = [one for one in unnamed if one.answer is None]
        if request.retry is None:
            return under_way[0] if under_way else None
        if not request.retry or self._was_refused(request.retry):
            return None
        old = [one for one in unnamed if one.began_here and one.tried < request.retry]
        return next((one for one in old if one.answer is None), old[-1] if old else None)

    def _was_refused(self, retry: int) -> bool:
        """Whether a try before this one was refused, and not sent again until now."""
        earlier = [number for number in self._refused if number < retry]
        if earlier:
            self._refused.remove(max(earlier))
        return bool(earlier)

    def begin(self, request: CallRequest, answered: Container[int]) -> AskedCall:
        """Make a new call, of the lowest occurrence that is neither answered nor under way."""
        taken = {one.occurrence for one in self.under_way}
        occurrence = 0
        while occurrence in answered or occurrence in taken:
            occurrence += 1
        made = AskedCall(
            occurrence=occurrence,
            key=request.idempotency_key,
            began_here=not request.retry,
            tried=request.retry or 0,
        )
        self.calls.append(made)
        return made

    def refuse(self, one: AskedCall) -> None:
        """Forget a call that has failed: its next try is the same occurrence again."""
        self.calls.remove(one)
        self._refused.append(one.tried)
