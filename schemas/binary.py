"""Events to bytes and back: Avro single-object framing, compiled once per event type.

Wire: `C3 01`, the 8-byte CRC-64-AVRO fingerprint of the writer's schema, the Avro binary body
(Apache Avro specification 1.12, "Single-object encoding"). Records of our own schema take a path
that is compiled from the dataclass and decodes raw tensors as views of the record's bytes;
records of another known schema are resolved by fastavro. Tests hold both to the same bytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Protocol

from fastavro import schemaless_reader
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException

from rlstreams.schemas.alike import Decoder
from rlstreams.schemas.avro import HISTORY, fingerprint, parsing_form, schema_text
from rlstreams.schemas.decoder import compile_decoder
from rlstreams.schemas.encoder import compile_encoder
from rlstreams.schemas.events import EVENTS, Event
from rlstreams.schemas.foreign import writer_schema
from rlstreams.schemas.outlines import Outlines
from rlstreams.schemas.shapes import from_plain
from rlstreams.schemas.straight import Straight, compile_straight
from rlstreams.schemas.straight_encoder import StraightEncoder, compile_straight_encoder
from rlstreams.schemas.tensor import Buffer

MARKER = b"\xc3\x01"
HEADER_BYTES = len(MARKER) + 8
# What reading foreign bytes raises, ours and fastavro's.
_CORRUPT = (
    IndexError,
    ValueError,
    OverflowError,
    EOFError,
    TypeError,
    KeyError,
    AttributeError,
    struct.error,
)
# What a foreign writer's schema raises: no schema, one that ours cannot take, a bottomless one.
_UNRESOLVABLE = (SchemaParseException, SchemaResolutionError, RecursionError)
_ENCODERS: dict[type[Event], _Encoder] = {}  # made at first use
_DECODERS: dict[bytes, Decoder] = {}  # by fingerprint
_OUTLINES: dict[bytes, Outlines[Straight]] = {}  # by the header of their records
_BY_NAME: Mapping[str, type[Event]] = {cls.__name__: cls for cls in EVENTS}


@dataclass(frozen=True, slots=True)
class _Encoder:
    any_outline: Callable[[Any], list[Buffer]]
    outlines: Outlines[StraightEncoder]


class DecodeError(ValueError):
    """Bytes that are not one of our events: foreign, truncated, corrupt or of an unknown schema."""


class UnknownSchemaError(DecodeError):
    """A well-framed record whose schema fingerprint is neither ours nor in the catalogue."""


class UnknownEventError(UnknownSchemaError):
    """A record whose schema is known, and is not of one of our events."""


class SchemaTexts(Protocol):
    """Writers' schema texts by fingerprint: a mapping, or what asks a log (`Bus.schemas`)."""

    def get(self, print_: bytes, /) -> str | None:
        """The text; None: nobody has it."""


NO_TEXTS: Mapping[bytes, str] = MappingProxyType({})


def encode(event: Event) -> list[Buffer]:
    """The record's value as buffers in order; tensors are not copied. Join them to send.

    Raises:
        TypeError, ValueError: a field holds what its type cannot.
    """
    encoder = _ENCODERS.get(type(event)) or _encoder(type(event))
    for straight in encoder.outlines.lines:
        try:
            buffers = straight(event)
        except _CORRUPT:  # of another outline, or a wrong type: the encoder of all events tells
            continue
        if straight is not encoder.outlines.lines[0]:
            encoder.outlines.prefer(straight)
        return buffers
    buffers = encoder.any_outline(event)
    encoder.outlines.learn(event)
    return buffers


def decode(value: Buffer, schemas: SchemaTexts = NO_TEXTS) -> Event:
    """The event in `value`. Raw tensors are views of `value`: it lives as long as they do.

    Args:
        value: a whole record.
        schemas: further schema texts, as the topic `schemas` has them; asked for what neither the
            package nor its history knows.

    Raises:
        DecodeError: not framed, truncated, with bytes to spare, or a field out of its domain.
        UnknownSchemaError: a fingerprint that neither the package nor `schemas` knows, or
            (`UnknownEventError`) one of an event that is none of ours.
    """
    view = memoryview(value)
    if type(value) is not bytes:
        return _decode_any(value, view.toreadonly(), schemas)
    outlines = _OUTLINES.get(value[:HEADER_BYTES])
    if outlines is None:
        event = _decode_any(value, view, schemas)
        if _fingerprint(value) in _DECODERS:
            compile_line = partial(compile_straight, type(event))
            _OUTLINES[value[:HEADER_BYTES]] = Outlines(type(event), compile_line)
        return event
    for straight in outlines.lines:
        try:
            event, end = straight(value, view, HEADER_BYTES)
        except _CORRUPT:  # of another outline, or damaged: the decoder of all records tells
            continue
        if end == len(value):
            if straight is not outlines.lines[0]:
                outlines.prefer(straight)
            return event  # type: ignore[no-any-return]
    event = _decode_any(value, view, schemas)
    outlines.learn(event)
    return event


def _decode_any(value: Buffer, view: memoryview, schemas: SchemaTexts) -> Event:
    """A record of any outline; errors as `decode`."""
    print_ = _fingerprint(value)
    decoder = _decoder(print_)
    try:
        if decoder is None:
            return _resolve(value, print_, schemas)
        record = value if type(value) is bytes else bytes(value)  # slices of it are looked up
        event, end = decoder(record, view, HEADER_BYTES)
    except DecodeError:
        raise
    except _CORRUPT as err:
        raise DecodeError(
            f"record of {len(value)} bytes, schema {print_.hex()}: damaged, "
            f"or cut short ({type(err).__name__}: {err})"
        ) from err
    if end != len(value):
        raise DecodeError(_length_message(type(event).__name__, end, len(value)))
    return event  # type: ignore[no-any-return]


def _fingerprint(value: Buffer) -> bytes:
    if value[:2] != MARKER or len(value) < HEADER_BYTES:
        raise DecodeError(
            f"record of {len(value)} bytes starts with {bytes(value[:2]).hex()!r}, "
            f"not with the Avro single-object marker {MARKER.hex()!r} and a fingerprint"
        )
    return bytes(value[2:HEADER_BYTES])


def _length_message(name: str, end: int, length: int) -> str:
    verb = "is truncated" if end > length else "has bytes to spare"
    return f"{name} {verb}: its fields end at byte {end}, the record at {length}"


def _encoder(cls: type[Event]) -> _Encoder:
    header = MARKER + fingerprint(schema_text(cls.__name__))
    compile_line = partial(compile_straight_encoder, cls, header=header)
    _ENCODERS[cls] = _Encoder(compile_encoder(cls, header), Outlines(cls, compile_line))
    return _ENCODERS[cls]


def _decoder(print_: bytes) -> Decoder | None:
    if print_ not in _DECODERS:
        cls = _ours().get(print_)
        if cls is None:
            return None
        _DECODERS[print_] = compile_decoder(cls)
    return _DECODERS[print_]


@cache
def _ours() -> Mapping[bytes, type[Event]]:
    return {fingerprint(schema_text(cls.__name__)): cls for cls in EVENTS}


@cache
def _history() -> dict[bytes, str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(HISTORY.glob("*.avsc"))]
    return {fingerprint(text): text for text in texts}


def _resolve(value: Buffer, print_: bytes, schemas: SchemaTexts) -> Event:
    text = _history().get(print_) or schemas.get(print_)
    if text is None:
        raise UnknownSchemaError(
            f"schema fingerprint {print_.hex()} is unknown: not in this package "
            "and not in the run's topic `schemas`; a newer rlstreams may have written it"
        )
    stream = io.BytesIO(value[HEADER_BYTES:])
    try:
        writer = writer_schema(text)
        name = str(writer["name"]).rpartition(".")[2]
        if name not in _BY_NAME:
            told = f"schema fingerprint {print_.hex()} is of an unknown event {name}"
            raise UnknownEventError(told)
        plain = schemaless_reader(stream, writer, parsing_form(schema_text(name)))
    except _UNRESOLVABLE as err:
        raise DecodeError(
            f"schema {print_.hex()} cannot be read as one of ours ({type(err).__name__}: {err})"
        ) from err
    if stream.read(1):
        raise DecodeError(f"{name} of schema {print_.hex()} has bytes to spare")
    event: Event = from_plain(_BY_NAME[name], plain)
    return event
