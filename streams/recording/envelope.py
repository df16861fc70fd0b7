"""A record of the log as a record of a container file: its envelope, and its event spliced in.

One file holds one kind of event under one writer's schema, so any Avro tool reads typed fields
without a union. What does not decode keeps its bytes whole, in a file whose `event` is `bytes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlstreams.schemas import DecodeError, decode
from rlstreams.schemas.avro import HISTORY, fingerprint, fingerprint_of_foreign, schema_text
from rlstreams.schemas.binary import HEADER_BYTES, MARKER
from rlstreams.schemas.events import EVENTS, Event
from rlstreams.schemas.tensor import Buffer
from rlstreams.schemas.varint import long_bytes, read_count, read_length, read_long
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.recording.container import Block, ContainerReader, Header
from rlstreams.streams.recording.errors import DamagedError, ForeignFileError

FORMAT = 1
_FINGERPRINT = re.compile("[0-9a-f]{16}")
OPAQUE = "bytes"  # in place of an event's name: values that are no event, or do not decode
_FIELDS: list[dict[str, Any]] = [
    {"name": "offset", "type": "long", "doc": "of the record, or of its first part"},
    {
        "name": "part_offsets",
        "type": {"type": "array", "items": "long"},
        "doc": "of every part, where the record was split",
    },
    {"name": "timestamp_ms", "type": "long", "doc": "as the broker has it"},
    {"name": "key", "type": "bytes"},
    {"name": "headers", "type": {"type": "map", "values": "bytes"}},
    {"name": "event_bytes", "type": "long", "doc": "length of `event` as it is encoded here"},
]


@dataclass(frozen=True, slots=True)
class Kind:
    """What one file holds."""

    partition: Partition
    event: str  # its name, or OPAQUE
    fingerprint: str  # of the writer's schema, hexadecimal; "" if opaque

    @property
    def file_name(self) -> str:
        """`steps/0-StepCompleted-0123456789abcdef.avro`."""
        parts = (str(self.partition.number), self.event, self.fingerprint)
        return f"{self.partition.topic}/{'-'.join(filter(None, parts))}.avro"

    def metadata(self, run: str, event_schema: str) -> dict[str, str]:
        """A file's header."""
        event: Any = json.loads(event_schema) if self.event != OPAQUE else "bytes"
        schema = {
            "type": "record",
            "name": "Recorded",
            "namespace": "rlstreams.recording",
            "doc": "A record of the log: its envelope, and its event as it was written.",
            "fields": [*_FIELDS, {"name": "event", "type": event}],
        }
        return {
            "avro.schema": json.dumps(schema, separators=(",", ":")),
            "rlstreams.format": str(FORMAT),
            "rlstreams.run": run,
            "rlstreams.topic": self.partition.topic,
            "rlstreams.partition": str(self.partition.number),
            "rlstreams.event": self.event,
            "rlstreams.fingerprint": self.fingerprint,
        }

    @classmethod
    def of(cls, header: Header, name: str) -> Kind:
        """What a file says that it holds.

        Raises:
            ForeignFileError: an Avro file, but none of a recording, or of a newer format.
            DamagedError: a fingerprint that is none.
        """
        metadata = {key: value.decode("utf-8", "replace") for key, value in header.metadata.items()}
        if "rlstreams.format" not in metadata:
            schema = json.loads(header.schema)
            what = schema.get("name", schema.get("type")) if isinstance(schema, dict) else schema
            raise ForeignFileError(
                f"{name} is an Avro file of {what!r}, not one of a recording: "
                "its header has no rlstreams.format"
            )
        if metadata["rlstreams.format"] != str(FORMAT):
            raise ForeignFileError(
                f"{name} has format {metadata['rlstreams.format']}, this release reads "
                f"{FORMAT}: a newer rlstreams wrote it; its events are plain Avro all the same"
            )
        try:
            place = Partition(metadata["rlstreams.topic"], int(metadata["rlstreams.partition"]))
            found = cls(place, metadata["rlstreams.event"], metadata["rlstreams.fingerprint"])
        except (KeyError, ValueError) as err:
            raise ForeignFileError(f"{name}: its header is incomplete: {err!r}") from err
        if not _FINGERPRINT.fullmatch(found.fingerprint) and found.event != OPAQUE:
            raise DamagedError(f"{name}: its header has no fingerprint: {found.fingerprint!r}")
        return found


@dataclass(frozen=True, slots=True)
class Described:
    """A record that is to be recorded: where it belongs, and its event if it has one."""

    kind: Kind
    event: Event | None
    schema: str  # the writer's text; "" if opaque


class Describer:
    """Finds the file of each record. Decodes it: what does not decode must not be spliced.

    Args:
        schemas: further writers' schemas, hexadecimal fingerprint -> text, as the topic
            `schemas` has them; may grow.
    """

    def __init__(self, schemas: dict[str, str]) -> None:
        self._texts = _known_schemas()
        self._extra = schemas
        self._names: dict[str, str] = {}
        self._kinds: dict[tuple[Partition, str], Kind] = {}

    def __call__(self, raw: RawRecord) -> Described:
        """Decode and describe."""
        print_ = bytes(raw.value[2:HEADER_BYTES]).hex()
        text = self._texts.get(print_) or self._extra.get(print_, "")
        if not text or raw.value[:2] != MARKER:
            return self._opaque(raw)
        try:
            event = decode(raw.value, {bytes.fromhex(print_): text})
        except DecodeError:  # bytes, or a schema, that nobody can read
            return self._opaque(raw)
        kind = self._kinds.get((raw.partition, print_))
        if kind is None:
            kind = Kind(raw.partition, type(event).__name__, print_)
            self._kinds[raw.partition, print_] = kind
        return Described(kind, event, text)

    def _opaque(self, raw: RawRecord) -> Described:
        return Described(Kind(raw.partition, OPAQUE, ""), None, "")


@cache
def _known_schemas() -> Mapping[str, str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(HISTORY.glob("*.avsc"))]
    texts += [schema_text(cls.__name__) for cls in EVENTS]
    return {fingerprint(text).hex(): text for text in texts}


def event_schema(reader: ContainerReader, fingerprint: str) -> str:
    """The writer's schema of the events in a file.

    Args:
        fingerprint: of that schema, hexadecimal.

    Raises:
        DamagedError: the schema is not that of a recording, or was changed.
    """
    try:
        fields = json.loads(reader.header.schema)["fields"]
        text = json.dumps(next(f["type"] for f in fields if f["name"] == "event"))
    except (KeyError, TypeError, StopIteration) as err:
        raise DamagedError(f"{reader.name}: its schema has no event") from err
    print_ = fingerprint_of_foreign(text)
    if print_ is None or print_.hex() != fingerprint:
        raise DamagedError(
            f"{reader.name}: bytes of its header were changed: "
            "its schema is not the one of its fingerprint"
        )
    return text


def spliced(raw: RawRecord, kind: Kind) -> list[Buffer]:
    """The record in Avro binary encoding, in pieces; the event's bytes are not copied."""
    body: list[Buffer]
    if kind.event == OPAQUE:
        body = [long_bytes(len(raw.value)), raw.value]
    else:
        body = [memoryview(raw.value)[HEADER_BYTES:]]
    envelope = b"".join(
        (
            long_bytes(raw.position.offset),
            _longs(raw.offsets if len(raw.offsets) > 1 else ()),
            long_bytes(raw.timestamp_ms),
            _bytes(raw.key),
            _map(raw),
            long_bytes(sum(map(len, body))),
        )
    )
    return [envelope, *body]


def _bytes(value: bytes) -> bytes:
    return long_bytes(len(value)) + value


def _longs(values: tuple[int, ...]) -> bytes:
    if not values:
        return b"\x00"
    return b"".join((long_bytes(len(values)), *map(long_bytes, values), b"\x00"))


def _map(raw: RawRecord) -> bytes:
    if not raw.headers:
        return b"\x00"
    items = (_bytes(key.encode()) + _bytes(bytes(value)) for key, value in raw.headers.items())
    return b"".join((long_bytes(len(raw.headers)), *items, b"\x00"))


def records_of(block: Block, kind: Kind, name: str) -> Iterator[RawRecord]:
    """The records of a block, their values as they were on the wire, bit for bit.

    Args:
        block: of a file of this kind.
        kind: what the file holds.
        name: of the file, for messages.

    Raises:
        DamagedError: the block does not hold as many records as it says.
    """
    prefix = b"" if kind.event == OPAQUE else MARKER + bytes.fromhex(kind.fingerprint)
    data, at = block.data, 0
    try:
        for _ in range(block.num_records):
            record, at = _record(data, at, kind, prefix)
            yield record
    except (IndexError, ValueError) as err:
        raise DamagedError(
            f"{name}: bytes were changed in the block at byte {block.at}: "
            f"a record makes no sense ({err})",
            at=block.at,
        ) from err
    if at != len(data):
        raise DamagedError(
            f"{name}: bytes were changed in the block at byte {block.at}: "
            f"{len(data) - at} of them belong to no record",
            at=block.at,
        )


def _record(data: bytes, at: int, kind: Kind, prefix: bytes) -> tuple[RawRecord, int]:
    offset, at = read_long(data, at)
    parts, at = _read_longs(data, at)
    timestamp_ms, at = read_long(data, at)
    key, at = _read_bytes(data, at)
    headers, at = _read_map(data, at)
    size, at = read_length(data, at)
    end = at + size
    if prefix:
        value = prefix + data[at:end]
    else:
        value, at = _read_bytes(data, at)
        if at != end:
            raise ValueError(f"a value ends at byte {at}, its record at {end}")
    record = RawRecord(
        position=Position(*kind.partition, offset),
        offsets=parts or (offset,),
        key=key,
        value=value,
        headers=headers,
        timestamp_ms=timestamp_ms,
    )
    return record, end


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_length(data, at)
    return data[at : at + size], at + size


def _read_longs(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    values: list[int] = []
    count, at = read_count(data, at)
    while count:
        for _ in range(count):
            value, at = read_long(data, at)
            values.append(value)
        count, at = read_count(data, at)
    return tuple(values), at


def _read_map(data: bytes, at: int) -> tuple[dict[str, bytes], int]:
    items: dict[str, bytes] = {}
    count, at = read_count(data, at)
    while count:
        for _ in range(count):
            key, at = _read_bytes(data, at)
            items[key.decode()], at = _read_bytes(data, at)
        count, at = read_count(data, at)
    return items, at
