"""The client's reports of one transaction: where each record lies, or why it does not.

There is one report a record, and each takes Python's lock by itself, beside a role that works on.
So a report only notes two numbers; positions are made once all have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streams.record import Outgoing, Position

Report = Callable[[Any, Any], None]  # (error or None, message)


class Reports:
    """What became of `num_records` records.

    `error` is the first that the client reported. `is_unplaced` says that the broker took a record
    for one that it had before: acknowledged, without an offset.
    """

    __slots__ = ("_places", "error", "is_unplaced")

    def __init__(self, num_records: int, error: Any = None) -> None:  # noqa: ANN401
        self._places: list[tuple[int, int] | None] = [None] * num_records
        self.error = error
        self.is_unplaced = False

    def of(self, index: int) -> Report:
        """The callback for a record, or for part 0 of it."""

        def delivered(error: Any, message: Any) -> None:  # noqa: ANN401
            offset = message.offset()
            if error is None and offset is not None:
                self._places[index] = message.partition(), offset
            elif error is None:
                self.is_unplaced = True
            else:
                self.error = self.error or error

        return delivered

    def positions(self, records: Sequence[Outgoing]) -> list[Position]:
        """Of those that are known to lie somewhere, in order."""
        places = zip(records, self._places, strict=True)
        return [Position(record.topic, *place) for record, place in places if place is not None]


NO_REPORTS = Reports(0)
