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
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

from fastavro import schemaless_reader
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException

from rlstreams.schemas.avro import HISTORY, fingerprint, parsing_form, schema_text
from rlstreams.schemas.decoder import Decoder, compile_decoder
from rlstreams.schemas.encoder import compile_encoder
from rlstreams.schemas.events import EVENTS, Event
from rlstreams.schemas.foreign import writer_schema
from rlstreams.schemas.shapes import from_plain
from rlstreams.schemas.tensor import Buffer

MARKER = b"\xc3\x01"
HEADER_BYTES = len(MARKER) + 8
# Errors that our decoders and fastavro raise for corrupt bytes.
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
# Errors that a foreign schema raises: no schema, one that ours cannot take, a bottomless one.
_UNRESOLVABLE = (SchemaParseException, SchemaResolutionError, RecursionError)
_BY_NAME: Mapping[str, type[Event]] = {cls.__name__: cls for cls in EVENTS}


class DecodeError(ValueError):
    """Bytes that are not one of our events: foreign, truncated, corrupt or of an unknown schema."""


class UnknownSchemaError(DecodeError):
    """A well-framed record whose schema fingerprint is neither ours nor in the catalogue."""


class UnknownEventError(UnknownSchemaError):
    """A record whose schema is known, and is not of one of our events."""


class SchemaTexts(Protocol):
    """Writers' schema texts by fingerprint: a mapping, or a look-up in a log (`Bus.schemas`)."""

    def get(self, print_: bytes, /) -> str | None:
        """Return the schema's text; None: no such fingerprint is known."""


NO_TEXTS: Mapping[bytes, str] = MappingProxyType({})


def encode(event: Event) -> list[Buffer]:
    """Return the record's value as buffers in order; tensors are not copied. Join them to send.

    Raises:
        TypeError, ValueError, AttributeError: a field holds what its type cannot.
    """
    return _encoder(type(event).__name__)(event)


def decode(value: Buffer, schemas: SchemaTexts = NO_TEXTS) -> Event:
    """Return the event in `value`. Raw tensors are views of `value`: it lives as long as they do.

    Args:
        value: a whole record.
        schemas: further schema texts, as the topic `schemas` has them, for fingerprints that
            neither the package nor its history knows.

    Raises:
        DecodeError: not framed, truncated, with bytes to spare, or a field out of its domain.
        UnknownSchemaError: a fingerprint that neither the package nor `schemas` knows, or
            (`UnknownEventError`) one of an event that is none of ours.
    """
    cls = _ours().get(bytes(value[:HEADER_BYTES]))
    if cls is not None:
        event: Event = read_own(_decoder(cls.__name__), cls, value)
        return event
    print_ = _fingerprint(value)
    try:
        return _resolve(value, print_, schemas)
    except DecodeError:
        raise
    except _CORRUPT as err:
        raise _damaged(value, err) from err


def header_of(cls: type[Event]) -> bytes:
    """Return the marker and fingerprint that begin an event's records of the present schema."""
    return MARKER + fingerprint(schema_text(cls.__name__))


def read_own(decoder: Decoder, cls: type[Event], value: Buffer) -> Any:  # noqa: ANN401
    """Decode a record that begins with `header_of(cls)`.

    Raises:
        DecodeError: damaged, truncated, or with bytes to spare.
    """
    record, view = value, memoryview(value)
    if type(record) is not bytes:
        record, view = bytes(value), view.toreadonly()
    try:
        found, end = decoder(record, view, HEADER_BYTES)
    except _CORRUPT as err:
        raise _damaged(value, err) from err
    if end != len(record):
        verb = "is truncated" if end > len(record) else "has bytes to spare"
        raise DecodeError(
            f"{cls.__name__} {verb}: its fields end at byte {end}, the record at {len(record)}"
        )
    return found


def _damaged(value: Buffer, err: Exception) -> DecodeError:
    return DecodeError(
        f"record of {len(value)} bytes, schema {bytes(value[2:HEADER_BYTES]).hex()}: damaged, "
        f"or cut short ({type(err).__name__}: {err})"
    )


def _fingerprint(value: Buffer) -> bytes:
    if value[:2] != MARKER or len(value) < HEADER_BYTES:
        raise DecodeError(
            f"record of {len(value)} bytes starts with {bytes(value[:2]).hex()!r}, "
            f"not with the Avro single-object marker {MARKER.hex()!r} and a fingerprint"
        )
    return bytes(value[2:HEADER_BYTES])


@cache
def _encoder(name: str) -> Callable[[Any], list[Buffer]]:
    return compile_encoder(_BY_NAME[name], header_of(_BY_NAME[name]))


@cache
def _decoder(name: str) -> Decoder:
    return compile_decoder(_BY_NAME[name])


@cache
def _ours() -> Mapping[bytes, type[Event]]:
    return {header_of(cls): cls for cls in EVENTS}


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
            message = f"schema fingerprint {print_.hex()} is of an unknown event {name}"
            raise UnknownEventError(message)
        plain = schemaless_reader(stream, writer, parsing_form(schema_text(name)))
    except _UNRESOLVABLE as err:
        raise DecodeError(
            f"schema {print_.hex()} cannot be read as one of ours ({type(err).__name__}: {err})"
        ) from err
    if stream.read(1):
        raise DecodeError(f"{name} of schema {print_.hex()} has bytes to spare")
    event: Event = from_plain(_BY_NAME[name], plain)
    return event
