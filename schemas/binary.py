"""Events to bytes and back: Avro single-object framing, compiled once per event type.

Wire: `C3 01`, the 8-byte CRC-64-AVRO fingerprint of the writer's schema, the Avro binary body
(Apache Avro specification 1.12, "Single-object encoding"). Records of our own schema take a path
that is compiled from the dataclass and decodes raw tensors as views of the record's bytes;
records of another known schema are resolved by fastavro. Tests hold both to the same bytes.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastavro import schemaless_reader

from schemas.avro import HISTORY, fingerprint, parsing_form, schema_text
from schemas.compiler import compile_decoder, compile_encoder, from_plain
from schemas.events import EVENTS, Event
from schemas.tensor import Buffer

MARKER = b"\xc3\x01"
HEADER_BYTES = len(MARKER) + 8
_BY_NAME: Mapping[str, type[Event]] = {cls.__name__: cls for cls in EVENTS}


class DecodeError(ValueError):
    """Bytes that are not one of our events: foreign, truncated, corrupt or of an unknown schema."""


class UnknownSchemaError(DecodeError):
    """A well-framed record whose schema fingerprint is neither ours nor in the catalogue."""


def encode(event: Event) -> list[Buffer]:
    """The record's value as buffers in order; tensors are not copied. Join them to send.

    Raises:
        TypeError, ValueError: a field holds what its type cannot.
    """
    return _encoder(type(event))(event)


def decode(value: Buffer, schemas: Mapping[bytes, str] | None = None) -> Event:
    """The event in `value`. Raw tensors are views of `value`: it lives as long as they do.

    Args:
        value: a whole record.
        schemas: further schema texts by fingerprint, as the topic `schemas` has them.

    Raises:
        DecodeError: not framed, truncated, with bytes to spare, or a field out of its domain.
        UnknownSchemaError: a fingerprint that neither the package nor `schemas` knows.
    """
    view = memoryview(value)
    if len(view) < HEADER_BYTES or view[:2] != MARKER:
        raise DecodeError(
            f"record of {len(view)} bytes starts with {bytes(view[:2]).hex()!r}, "
            f"not with the Avro single-object marker {MARKER.hex()!r}"
        )
    print_ = bytes(view[2:HEADER_BYTES])
    try:
        decoder = _decoders().get(print_)
        if decoder is not None:
            event, end = decoder(view, HEADER_BYTES)
            if end != len(view):
                raise DecodeError(_length_message(type(event).__name__, end, len(view)))
            return event  # type: ignore[no-any-return]
        return _resolve(view, print_, schemas or {})
    except DecodeError:
        raise
    except (IndexError, ValueError, OverflowError, EOFError, TypeError, KeyError) as err:
        raise DecodeError(
            f"record of {len(view)} bytes, schema {print_.hex()}: {type(err).__name__}: {err}"
        ) from err


def _length_message(name: str, end: int, length: int) -> str:
    verb = "is truncated" if end > length else "has bytes to spare"
    return f"{name} {verb}: its fields end at byte {end}, the record at {length}"


@cache
def _encoder(cls: Any) -> Callable[[Event], list[Buffer]]:  # noqa: ANN401
    return compile_encoder(cls, MARKER + fingerprint(schema_text(cls.__name__)))


@cache
def _decoders() -> dict[bytes, Callable[[memoryview, int], tuple[Any, int]]]:
    return {fingerprint(schema_text(cls.__name__)): compile_decoder(cls) for cls in EVENTS}


@cache
def _history() -> dict[bytes, str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(HISTORY.glob("*.avsc"))]
    return {fingerprint(text): text for text in texts}


def _resolve(view: memoryview, print_: bytes, schemas: Mapping[bytes, str]) -> Event:
    text = schemas.get(print_) or _history().get(print_)
    if text is None:
        raise UnknownSchemaError(
            f"schema fingerprint {print_.hex()} is unknown: not in this package "
            "and not in the run's topic `schemas`; a newer rlstreams may have written it"
        )
    writer = parsing_form(text)
    name = str(writer["name"]).rpartition(".")[2]
    if name not in _BY_NAME:
        raise UnknownSchemaError(f"schema fingerprint {print_.hex()} is of an unknown event {name}")
    stream = io.BytesIO(view[HEADER_BYTES:])
    plain = schemaless_reader(stream, writer, parsing_form(schema_text(name)))
    if stream.read(1):
        raise DecodeError(f"{name} of schema {print_.hex()} has bytes to spare")
    event: Event = from_plain(_BY_NAME[name], plain)
    return event


def to_plain(value: Any) -> Any:  # noqa: ANN401
    """An event as nested dicts and lists, as fastavro writes them; views become bytes."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return bytes(value) if isinstance(value, memoryview) else value
