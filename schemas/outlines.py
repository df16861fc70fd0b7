"""Which outlines the records of an event have, and the straight lines of code that decode them."""

from __future__ import annotations

from itertools import islice
from typing import Any

from schemas.straight import Outline, Straight, compile_straight, outline_of

_MAX_LINES = 8  # at a time; one that no record wanted for long makes room
_MAX_COMPILED = 64  # ever, by one process: compiling takes milliseconds
_OFTEN = 4  # looks that find an outline before it is compiled
_MAX_STEPS = 32  # of an outline; longer ones do not repeat
_CANDIDATES = 64
_LOOKS = 64  # at the first records, then at one of `_SELDOM`
_SELDOM = 16


class Outlines:
    """Of one event. Threads may meet here: what they lose is a count, or a line compiled twice."""

    def __init__(self, cls: type) -> None:
        self.lines: tuple[Straight, ...] = ()  # the latest that matched first
        self._cls = cls
        self._candidates: dict[Outline, int] = {}
        self._num_seen = self._num_compiled = 0

    def prefer(self, line: Straight) -> None:
        """It matched: the next record is likely to be alike."""
        self.lines = (line, *(other for other in self.lines if other is not line))

    def learn(self, event: Any) -> None:  # noqa: ANN401
        """No line matched this one's record."""
        self._num_seen += 1
        if self._num_compiled >= _MAX_COMPILED:
            return
        if self._num_seen > _LOOKS and self._num_seen % _SELDOM:
            return
        outline = tuple(islice(outline_of(self._cls, event), _MAX_STEPS + 1))
        if len(outline) > _MAX_STEPS:
            return
        count = self._candidates.get(outline, 0) + 1
        if len(self._candidates) >= _CANDIDATES:
            self._candidates.clear()
        self._candidates[outline] = count
        if count == _OFTEN:
            self._num_compiled += 1
            line = compile_straight(self._cls, outline)
            self.lines = (line, *self.lines[: _MAX_LINES - 1])
