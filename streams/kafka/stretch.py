"""Sends records and proves with two delivery reports per partition that all are in the log.

A report for each message costs as much as sending it. But the messages of one transaction in one
partition are contiguous, unless another writer's are interleaved: the offsets of the first and the
last prove that none is missing. The last one is known only at the end, so the newest record of
each partition is held back until the next one arrives.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from rlstreams.streams.log.parts import PART_BYTES, num_parts, part_headers, split, whole
from rlstreams.streams.log.record import Outgoing


class _Stretch:
    """One partition's part of a transaction; `held` is its newest record, not sent yet."""

    __slots__ = (
        "_first",
        "_is_unplaced",
        "_last",
        "error",
        "held",
        "num_messages",
        "number",
        "topic",
    )

    def __init__(self, topic: str, held: Outgoing, number: int) -> None:
        self.topic = topic  # as the client names it
        self.held = held
        self.number = number  # of the partition
        self.num_messages = 0  # sent; a record of several parts has several
        self.error: Any = None  # the client's, of a message that was refused
        self._first: int | None = None
        self._last: int | None = None
        self._is_unplaced = False  # a message that was reported has no place

    def delivered(self, error: Any, message: Any) -> None:  # noqa: ANN401
        """The client's report of the first or the last message."""
        if error is not None:
            self.error = self.error or error
            return
        offset = message.offset()
        if offset is None:  # taken for one that came before
            self._is_unplaced = True
            return
        if self._first is None:
            self._first = offset
        self._last = offset

    @property
    def is_whole(self) -> bool:
        """Whether every message has a place in the log.

        Where other writers' records lie between ours, offsets alone do not prove the middle: that
        no batch behind the first is lost is the broker's promise to a client with one in flight.
        """
        if self._is_unplaced or self._first is None or self._last is None:
            return False
        return self._last - self._first + 1 >= self.num_messages


class Stretches:
    """The records of one transaction.

    Args:
        produce: of the client; raises BufferError if its queue is full.
        wait: takes the same, and waits until there is room.
        prefix: of topics.
        partition: where a record goes that names no partition.
    """

    def __init__(
        self,
        produce: Callable[..., None],
        wait: Callable[..., None],
        prefix: str,
        partition: Callable[[Outgoing], int],
    ) -> None:
        self._produce = produce
        self._wait = wait
        self._prefix = prefix
        self._partition = partition
        self._by_place: dict[tuple[str, int], _Stretch] = {}

    def send(self, records: Iterable[Outgoing]) -> None:
        """Hand all of them to the client, each partition's in order."""
        by_place, partition = self._by_place, self._partition
        for record in records:
            number = record.partition
            if number is None:
                number = partition(record)
            place = record.topic, number
            stretch = by_place.get(place)
            if stretch is None:
                by_place[place] = _Stretch(self._prefix + record.topic, record, number)
                continue
            if stretch.num_messages and len(stretch.held) <= PART_BYTES:  # nearly all
                self._send_middle(stretch)
            else:
                self._send(stretch, is_end=not stretch.num_messages)
            stretch.held = record
        for stretch in self._by_place.values():
            self._send(stretch, is_end=True)

    @property
    def error(self) -> Any:  # noqa: ANN401
        """What the client said of the first message that was refused; None if none was."""
        errors = (s.error for s in self._by_place.values() if s.error is not None)
        return next(errors, None)

    @property
    def is_whole(self) -> bool:
        """Whether every message was reported to be in the log, or lies between two that were."""
        return all(stretch.is_whole for stretch in self._by_place.values())

    def _send_middle(self, stretch: _Stretch) -> None:
        """The record that is held back, in one part and without a report."""
        record = stretch.held
        value, headers = whole(record.value), record.headers
        if not isinstance(headers, dict):
            headers = dict(headers)
        try:
            self._produce(
                stretch.topic, value, record.key, partition=stretch.number, headers=headers
            )
        except BufferError:
            self._wait(stretch.topic, value, record.key, partition=stretch.number, headers=headers)
        stretch.num_messages += 1

    def _send(self, stretch: _Stretch, *, is_end: bool) -> None:
        """The record that is held back; with reports if it is the first or the last one."""
        record, topic = stretch.held, stretch.topic
        settings: dict[str, Any] = {"partition": stretch.number}
        if len(record) <= PART_BYTES:
            if is_end:
                settings["on_delivery"] = stretch.delivered
            settings["headers"] = dict(record.headers)
            self._enqueue(topic, whole(record.value), record.key, settings)
            stretch.num_messages += 1
            return
        count, record_id = num_parts(len(record)), secrets.token_hex(8)
        for index, part in enumerate(split(record.value)):
            settings["headers"] = part_headers(record.headers, record_id, index, count)
            settings.pop("on_delivery", None)
            if is_end and index in (0, count - 1):
                settings["on_delivery"] = stretch.delivered
            self._enqueue(topic, part, record.key, settings)
            stretch.num_messages += 1

    def _enqueue(self, topic: str, value: bytes, key: bytes, settings: dict[str, Any]) -> None:
        try:
            self._produce(topic, value, key, **settings)
        except BufferError:
            self._wait(topic, value, key, **settings)
