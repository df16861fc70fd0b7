"""Read a few fields of a record and step over the rest, without building the event.

A reader that only accounts for records (the audit) needs a handful of integers of each. Python
source is generated once per event and choice of fields (`schemas.skim_source`), as for decoding.
Texts stay bytes: they are compared and looked up, seldom shown.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from schemas.avro import fingerprint, schema_text
from schemas.binary import HEADER_BYTES, MARKER, NO_TEXTS, DecodeError, SchemaTexts, decode
from schemas.shapes import fields_of, shape_of
from schemas.skim_source import Wanted, compile_skimmer
from schemas.tensor import Buffer

_CORRUPT = (IndexError, ValueError, OverflowError, struct.error)


class Skimmer:
    """Reads the fields `paths` of records of `cls`.

    A path names a field, or with dots one of a record within; through an array of records it gives
    a list with a tuple for each item. Wanted may be integers, texts (as bytes), booleans, and
    arrays of integers of which the first item counts (`token_ids.shape`: the number of tokens).

    Raises:
        TypeError: a path that the event does not have, or that leads to none of these.
    """

    def __init__(self, cls: type, paths: Sequence[str]) -> None:
        self._cls = cls
        self._wanted = _tree(paths)
        self._header = MARKER + fingerprint(schema_text(cls.__name__))
        self._skim = compile_skimmer(cls, self._wanted)

    def __call__(self, value: Buffer, schemas: SchemaTexts = NO_TEXTS) -> Any:  # noqa: ANN401
        """The wanted values of one record, a tuple in the order of the schema.

        The whole record is walked, so one that was cut or damaged is noticed as far as lengths go;
        what is stepped over is not looked at.

        Raises:
            DecodeError: not a record of this event.
        """
        record = value if type(value) is bytes else bytes(value)
        if not record.startswith(self._header):
            return self._resolve(record, schemas)
        try:
            found, end = self._skim(record, HEADER_BYTES)
        except _CORRUPT as err:
            raise DecodeError(
                f"{self._cls.__name__} of {len(record)} bytes: damaged, or cut short "
                f"({type(err).__name__}: {err})"
            ) from err
        if end != len(record):
            raise DecodeError(
                f"{self._cls.__name__}: its fields end at byte {end}, the record at {len(record)}"
            )
        return found

    def _resolve(self, record: bytes, schemas: SchemaTexts) -> Any:  # noqa: ANN401
        """Of an older or newer schema: decoded in full."""
        event = decode(record, schemas)
        if not isinstance(event, self._cls):
            raise DecodeError(f"a {type(event).__name__} where a {self._cls.__name__} belongs")
        return tuple(_pick(event, self._cls, self._wanted))


def _tree(paths: Sequence[str]) -> Wanted:
    tree: Wanted = {}
    for path in paths:
        branch = tree
        for name in path.split("."):
            branch = branch.setdefault(name, {})
    return tree


def _pick(event: Any, cls: type, wanted: Wanted) -> list[Any]:  # noqa: ANN401
    """The same values from a decoded event."""
    found: list[Any] = []
    for name, kind in fields_of(cls):
        if name not in wanted:
            continue
        value, (shape, inner) = getattr(event, name), shape_of(kind)
        if shape == "record":
            found += _pick(value, inner, wanted[name])
        elif shape == "array" and inner is not int:
            found.append([tuple(_pick(item, inner, wanted[name])) for item in value])
        elif shape == "array":
            found.append(value[0] if value else 0)
        else:
            found.append(value.encode() if isinstance(value, str) else value)
    return found
