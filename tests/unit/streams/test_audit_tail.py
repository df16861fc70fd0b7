"""An audit reads a topic in stretches: all below the end that was asked, and not a record more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from rlstreams.streams.audit.auditor import Tail
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import PROMPTS

ONE, TWO = Partition(PROMPTS.name, 0), Partition(PROMPTS.name, 1)


class Reader:
    """Gives out these records, and remembers how many were asked for."""

    def __init__(self, records: list[RawRecord]) -> None:
        self.asked: list[int] = []
        self._left = records
        self._at = {ONE: 0, TWO: 0}

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        del timeout_s
        self.asked.append(max_records)
        given, self._left = self._left[:max_records], self._left[max_records:]
        for raw in given:
            self._at[raw.partition] = raw.position.offset + 1
        return given

    def positions(self) -> Mapping[Partition, int]:
        return dict(self._at)

    def close(self) -> None:
        """Nothing to release."""


class _Bus:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def reader(self, offsets: Mapping[Partition, int]) -> Reader:
        assert set(offsets) == {ONE, TWO}
        return self._reader


def raw(partition: Partition, offset: int) -> RawRecord:
    return RawRecord(Position(*partition, offset), (offset,), b"", b"")


def tail_of(reader: Reader, deadline_s: float = 1.0) -> Tail:
    return Tail(cast("Bus", _Bus(reader)), PROMPTS, {ONE: 0, TWO: 0}, deadline_s)


def read(tail: Tail, **ends: Any) -> list[tuple[int, int]]:
    wanted = {ONE: ends["one"], TWO: ends["two"]}
    return [(raw.position.partition, raw.position.offset) for raw in tail.up_to(wanted)]


def test_what_lies_beyond_the_end_waits_for_a_later_stretch() -> None:
    """Also behind an end that another partition's records were still read for."""
    records = [raw(ONE, 0), raw(ONE, 1), raw(ONE, 2), raw(TWO, 0), raw(TWO, 1)]
    tail = tail_of(Reader(records))
    assert read(tail, one=1, two=1) == [(0, 0), (1, 0)]
    assert read(tail, one=1, two=2) == [(1, 1)]
    assert read(tail, one=3, two=2) == [(0, 1), (0, 2)]


def test_nothing_is_polled_where_nothing_is_missing() -> None:
    """A round of an audit that follows a quiet run costs no waiting."""
    reader = Reader([])
    assert read(tail_of(reader), one=0, two=0) == []
    assert reader.asked == []


def test_a_partition_that_does_not_deliver_is_named() -> None:
    """With where it is, and where it should be."""
    tail = tail_of(Reader([raw(ONE, 0)]), deadline_s=0.0)
    with pytest.raises(DeadlineError, match=r"prompts\[1\] is at 0 of 4: nothing delivered"):
        read(tail, one=1, two=4)
