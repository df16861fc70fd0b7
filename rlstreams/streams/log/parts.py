"""Large records are split into parts before sending and joined again after reading.

A broker's default limit is 1 MiB per batch; a trajectory with routed experts has tens of MB.
Each part of a split record carries `rlstreams-part` = `i/n` (ASCII, from 0) and
`rlstreams-record` = an id of its own. Parts are in order, but other records, even of the same
key, may be interleaved: parts are joined by that id, never by adjacency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlstreams.schemas.tensor import Buffer
from rlstreams.streams.log.record import PART_HEADER, RECORD_HEADER, Partition, Position, RawRecord

PART_BYTES = 900_000
_ONE_PART = ("", 0, 1)


class Message(NamedTuple):
    """The content of a partition at one offset: a whole record, or one part of a record."""

    partition: Partition
    offset: int
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]
    timestamp_ms: int


class RecordKey(NamedTuple):
    """Key of a record of several parts while it is read."""

    partition: Partition
    record_id: str


def num_parts(num_bytes: int, part_bytes: int = PART_BYTES) -> int:
    """Return the number of parts of a value of this size; an empty value takes one."""
    return max(1, -(-num_bytes // part_bytes))


def whole(pieces: Sequence[Buffer]) -> bytes:
    """Return the value in one piece; a single `bytes` object is passed on uncopied."""
    only = pieces[0] if len(pieces) == 1 else None
    return only if isinstance(only, bytes) else b"".join(pieces)


def split(pieces: Sequence[Buffer], part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yield the value in parts of `part_bytes`, the last one shorter.

    Each part is joined by itself, so a large value exists twice only one part at a time.
    """
    if sum(map(len, pieces)) <= part_bytes:
        yield whole(pieces)
        return
    part: list[Buffer] = []
    room = part_bytes
    for piece in pieces:
        view = memoryview(piece)
        while len(view) > room:
            yield b"".join((*part, view[:room]))
            view = view[room:]
            part, room = [], part_bytes
        part.append(view)
        room -= len(view)
    yield b"".join(part)


def part_headers(
    headers: Mapping[str, bytes], record_id: str, index: int, count: int
) -> list[tuple[str, bytes]]:
    """Return a part's headers; a record of one part has only its own."""
    own = list(headers.items())
    if count == 1:
        return own
    return [
        *own,
        (PART_HEADER, f"{index}/{count}".encode()),
        (RECORD_HEADER, record_id.encode()),
    ]


@dataclass(slots=True)
class _Incomplete:
    """Parts of a record so far: 0, 1, 2, ... without a gap."""

    count: int
    parts: list[Message] = field(default_factory=list)

    def record(self, *, torn: bool) -> RawRecord:
        first = self.parts[0]
        headers = {k: v for k, v in first.headers.items() if k not in (PART_HEADER, RECORD_HEADER)}
        if torn:
            headers[PART_HEADER] = f"{len(self.parts)}/{self.count}".encode()
        return RawRecord(
            position=Position(*first.partition, first.offset),
            offsets=tuple(part.offset for part in self.parts),
            key=first.key,
            value=b"".join(part.value for part in self.parts),
            headers=headers,
            timestamp_ms=first.timestamp_ms,
        )


class Assembler:
    """Joins parts into records.

    A torn record (parts that were never committed) is returned as far as it came, with the header
    `rlstreams-part` = `seen/count`: it does not decode, so it is dead-lettered like any other bad
    record, and blocks no reader.
    """

    def __init__(self) -> None:
        self._incomplete: dict[RecordKey, _Incomplete] = {}

    def add(self, message: Message) -> RawRecord | None:
        """Return the record that `message` makes whole, or the torn one that it proves.

        Parts whose part 0 was not seen belong to a record that began before the start: skipped.
        """
        record_id, index, count = _part_of(message.headers)
        if count == 1:
            return _alone(message)
        key = RecordKey(message.partition, record_id)
        if index == 0:
            self._incomplete[key] = _Incomplete(count)
        record = self._incomplete.get(key)
        if record is None:
            return None
        if index != len(record.parts) or count != record.count:
            return self.give_up(key)
        record.parts.append(message)
        if index + 1 < count:
            return None
        del self._incomplete[key]
        return record.record(torn=False)

    def incomplete(self) -> Sequence[RecordKey]:
        """Return the keys of records begun and not whole, oldest first."""
        return tuple(self._incomplete)

    def give_up(self, key: RecordKey) -> RawRecord:
        """Return the torn record `key`, and stop waiting for its other parts."""
        return self._incomplete.pop(key).record(torn=True)

    def first_offset(self, partition: Partition) -> int | None:
        """Return the offset of the earliest incomplete record's first part; None: none."""
        firsts = (r.parts[0].offset for k, r in self._incomplete.items() if k[0] == partition)
        return min(firsts, default=None)

    def forget(self, partition: Partition) -> None:
        """Drop incomplete records of `partition`."""
        for key in [key for key in self._incomplete if key.partition == partition]:
            del self._incomplete[key]


def _alone(message: Message) -> RawRecord:
    """Return a record of one part: its value is the message's own bytes."""
    (topic, number), offset, key, value, headers, timestamp_ms = message
    position = Position(topic, number, offset)
    return RawRecord(position, (offset,), key, value, headers, timestamp_ms)


def _part_of(headers: Mapping[str, bytes]) -> tuple[str, int, int]:
    """Return record id, index and count; headers that are not ours mean one part."""
    if PART_HEADER not in headers or RECORD_HEADER not in headers:
        return _ONE_PART
    try:
        index, _, count = headers[PART_HEADER].decode("ascii").partition("/")
        part = (headers[RECORD_HEADER].decode(), int(index), int(count))
    except (ValueError, AttributeError):  # AttributeError: a header without a value
        return _ONE_PART
    return part if 0 <= part[1] < part[2] else _ONE_PART
