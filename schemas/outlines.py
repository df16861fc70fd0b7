"""Which outlines the records of an event have, and the straight lines of code for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rlstreams.schemas.straight import Outline, outline_of

Line = TypeVar("Line")

_MAX_LINES = 8  # at a time; one that no record wanted for long makes room
_MAX_COMPILED = 64  # ever, by one process: compiling takes milliseconds
_OFTEN = 4  # looks that find an outline before it is compiled
_MAX_STEPS = 32  # of an outline; longer ones do not repeat
_MAX_ITEMS = 32  # of an array or a map; each is code of its own: 128 take 0.1 s to compile
_CANDIDATES = 64
_LOOKS = 64  # at the first records, then at one of `_SELDOM`
_SELDOM = 16


class Outlines(Generic[Line]):
    """Of one event. Threads may meet here: what they lose is a count, or a line compiled twice."""

    def __init__(self, cls: type, compile_line: Callable[[Outline], Line]) -> None:
        """`compile_line` makes the function that encodes, or decodes, records of an outline."""
        self.lines: tuple[Line, ...] = ()  # the latest that matched first
        self._cls = cls
        self._compile = compile_line
        self._candidates: dict[Outline, int] = {}
        self._num_seen = self._num_compiled = 0

    def prefer(self, line: Line) -> None:
        """It matched: the next record is likely to be alike."""
        self.lines = (line, *(other for other in self.lines if other is not line))

    def learn(self, event: Any) -> None:  # noqa: ANN401
        """No line matched this one's record. One with a field of a wrong type has no outline."""
        self._num_seen += 1
        if self._num_compiled >= _MAX_COMPILED:
            return
        if self._num_seen > _LOOKS and self._num_seen % _SELDOM:
            return
        outline = self._outline(event)
        if outline is None:
            return
        count = self._candidates.get(outline, 0) + 1
        if len(self._candidates) >= _CANDIDATES:
            self._candidates.clear()
        self._candidates[outline] = count
        if count == _OFTEN:
            self._num_compiled += 1
            line = self._compile(outline)
            self.lines = (line, *self.lines[: _MAX_LINES - 1])

    def _outline(self, event: Any) -> Outline | None:  # noqa: ANN401
        """None: it has none, or one too long for a line, the rest of which is not looked at."""
        steps: list[int] = []
        try:
            for step in outline_of(self._cls, event):
                if len(steps) == _MAX_STEPS or step > _MAX_ITEMS:
                    return None
                steps.append(step)
        except (TypeError, AttributeError):
            return None
        return tuple(steps)
