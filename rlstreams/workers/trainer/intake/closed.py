"""The set of closed groups: dense issue numbers make it one watermark and a few numbers above."""

from __future__ import annotations

from collections.abc import Iterable

from rlstreams.schemas.events import ClosedGroups


class ClosedSet:
    """Numbers of closed groups. All below `watermark` are in it; only those above are stored.

    Invariant: `watermark` is not in the set, and the set is all numbers below it plus `above`.
    Its size is bounded by the groups that are open at one time, not by the length of the run.
    """

    def __init__(self, closed: ClosedGroups | None = None) -> None:
        self._watermark = closed.watermark if closed else 0
        self._above: set[int] = set()
        for number in closed.above if closed else ():
            self.add(number)

    def __contains__(self, number: int) -> bool:
        return number < self._watermark or number in self._above

    def add(self, number: int) -> None:
        """Put `number` in; doing it twice changes nothing.

        Raises:
            ValueError: a negative number.
        """
        if number < 0:
            raise ValueError(f"group number must be 0 or above, got {number}")
        if number in self:
            return
        self._above.add(number)
        while self._watermark in self._above:
            self._above.remove(self._watermark)
            self._watermark += 1

    def union(self, numbers: Iterable[int]) -> ClosedSet:
        """A copy that holds `numbers` too."""
        copy = ClosedSet(self.event())
        for number in numbers:
            copy.add(number)
        return copy

    def event(self) -> ClosedGroups:
        """The set as it is written to `steps`."""
        return ClosedGroups(watermark=self._watermark, above=tuple(sorted(self._above)))
