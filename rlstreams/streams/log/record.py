"""A record: an event in its envelope, and its position in a topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from rlstreams.schemas.tensor import Buffer

E_co = TypeVar("E_co", covariant=True)

ID_HEADER = "rlstreams-id"
PURPOSE_HEADER = "rlstreams-purpose"
PART_HEADER = "rlstreams-part"
RECORD_HEADER = "rlstreams-record"
REPLAY_HEADER = "rlstreams-replay-of"  # `{run}/{topic}[{partition}]@{offset}` of the recorded log


class Partition(NamedTuple):
    """One partition of one topic, named without the run's prefix."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"


class Position(NamedTuple):
    """The place of one record: topic, partition, and the offset of its part 0."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


NO_PLACE = -1  # place of a record that was not seen
_OFFSET_BITS = 44
_MAX_PARTITION = 1 << 19


def place_of(partition: int, offset: int) -> int:
    """Return partition and offset as one integer, a third of a tuple's size, or NO_PLACE."""
    if 0 <= partition < _MAX_PARTITION and 0 <= offset < 1 << _OFFSET_BITS:
        return partition << _OFFSET_BITS | offset
    return NO_PLACE


def position_at(topic: str, place: int) -> Position:
    """Return the position of a place in a topic."""
    return Position(topic, place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1))


class RawRecord(NamedTuple):
    """A whole record as it was read, its parts joined. A tuple: every record read becomes one."""

    position: Position
    offsets: tuple[int, ...]  # of every part; one for a record that was not split
    key: bytes
    value: Buffer
    headers: Mapping[str, bytes] = MappingProxyType({})
    timestamp_ms: int = 0

    @property
    def partition(self) -> Partition:
        """The partition that holds it."""
        return Partition(self.position.topic, self.position.partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[E_co]):
    """A decoded record: the event, and its envelope."""

    event: E_co
    raw: RawRecord

    @property
    def position(self) -> Position:
        """The position of the record."""
        return self.raw.position


@dataclass(slots=True, kw_only=True)  # not frozen: every record sent is one, and that costs 0.5 us
class Outgoing:
    """A record to send; not changed afterwards.

    A large `value` is in pieces, so that tensors are not joined twice.
    """

    topic: str
    key: bytes
    value: Sequence[Buffer]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    partition: int | None = None  # None: murmur2 of the key

    def __len__(self) -> int:
        """Bytes of the value."""
        value = self.value
        return len(value[0]) if len(value) == 1 else sum(map(len, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A group's position in one partition: the next offset, and the done set above it."""

    offset: int
    metadata: str = ""
