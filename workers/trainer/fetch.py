"""Read records again by their recorded positions."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from streams.bus import Bus
from streams.record import Partition, Position, RawRecord


class RecordGoneError(Exception):
    """A recorded position holds no record: removed by retention, or the topic is another one."""


def fetch(
    bus: Bus,
    positions: Sequence[Position],
    *,
    deadline_s: float = 120.0,
    while_waiting: Callable[[], None] = lambda: None,
) -> list[RawRecord]:
    """The records at `positions`, in that order.

    Args:
        while_waiting: called between polls; the trainer's heartbeat.

    Raises:
        OffsetGoneError: below the beginning of the log; names the range that is there.
        RecordGoneError: the reader passed a position without meeting its record.
        TimeoutError: not all were read within `deadline_s`; names the first missing one.
    """
    wanted: defaultdict[Partition, set[int]] = defaultdict(set)
    for topic, number, offset in positions:
        wanted[Partition(topic, number)].add(offset)
    found: dict[Position, RawRecord] = {}
    until = time.monotonic() + deadline_s
    with bus.reader() as reader:
        for partition, offsets in wanted.items():
            reader.seek({partition: min(offsets)})
            while left := {o for o in offsets if Position(*partition, o) not in found}:
                if time.monotonic() > until:
                    missing = Position(*partition, min(left))
                    raise TimeoutError(f"{missing} was not read within {deadline_s:g} s")
                for raw in reader.poll(500, 0.1):
                    if raw.position.offset in offsets:
                        found[raw.position] = raw
                _check_passed(reader.positions()[partition], partition, left, found)
                while_waiting()
    return [found[position] for position in positions]


def _check_passed(
    at: int, partition: Partition, left: set[int], found: dict[Position, RawRecord]
) -> None:
    for offset in left:
        if offset < at and Position(*partition, offset) not in found:
            raise RecordGoneError(
                f"{Position(*partition, offset)} holds no committed record; the reader is at {at}"
            )
