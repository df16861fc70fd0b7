"""The records of one transaction on their way into the log: one delivery report each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from rlstreams.streams.log.parts import PART_BYTES, num_parts, part_headers, split, whole
from rlstreams.streams.log.record import Outgoing, Position


class Reports:
    """The records of one transaction, each with its delivery report.

    Args:
        produce: the client's method; waits while the client's queue is full.
        prefix: of topics.
    """

    def __init__(self, produce: Callable[..., None], prefix: str) -> None:
        self._produce = produce
        self._prefix = prefix
        self._found: list[Position | None] = []
        self.error: Any = None  # the client's error for the first refused message

    def send(self, records: Iterable[Outgoing]) -> None:
        """Hand all records to the client."""
        for record in records:
            self._found.append(None)
            self._send(len(self._found) - 1, record)

    @property
    def positions(self) -> list[Position]:
        """Positions of the records that have a place in the log, in order."""
        return [position for position in self._found if position is not None]

    @property
    def is_whole(self) -> bool:
        """Whether the reports prove that no record is missing from the log."""
        return None not in self._found

    def _send(self, index: int, record: Outgoing) -> None:
        def delivered(error: Any, message: Any) -> None:  # noqa: ANN401
            """Note the offset of part 0, or the error."""
            if error is not None:
                self.error = self.error or error
            elif message.offset() is not None:  # None: the broker took it for a duplicate
                place = message.partition(), message.offset()
                self._found[index] = Position(record.topic, *place)

        topic = self._prefix + record.topic
        # Only of part 0: a report copies the whole message.
        settings: dict[str, Any] = {"on_delivery": delivered}
        if record.partition is not None:
            settings["partition"] = record.partition
        if len(record) <= PART_BYTES:  # nearly all
            settings["headers"] = list(record.headers.items())
            self._produce(topic, whole(record.value), record.key, **settings)
            return
        count, record_id = num_parts(len(record)), secrets.token_hex(8)
        for number, part in enumerate(split(record.value)):
            settings["headers"] = part_headers(record.headers, record_id, number, count)
            self._produce(topic, part, record.key, **settings)
            settings.pop("on_delivery", None)
