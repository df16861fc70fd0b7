"""Read a few fields of a record and step over the rest, without building the event.

A reader that only accounts for records (the audit) needs a handful of integers of each. Python
source is generated once per event and choice of fields, as for decoding; what is not wanted is
stepped over by its length. Texts stay bytes: they are compared and looked up, seldom shown.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.avro import fingerprint, schema_text
from schemas.binary import HEADER_BYTES, MARKER, DecodeError, decode
from schemas.shapes import fields_of, shape_of
from schemas.source import Source
from schemas.tensor import Buffer
from schemas.varint import read_count, read_length, read_long

Wanted = dict[str, "Wanted"]  # by field; an empty one is a leaf

_CORRUPT = (IndexError, ValueError, OverflowError, struct.error)
_ONE_BYTE = (*((z >> 1) ^ -(z & 1) for z in range(128)), *(None for _ in range(128)))
# By the first byte of a text: bytes with the length byte, or 0: longer, negative, or more follow.
_SHORT_TEXT = tuple(1 + (z >> 1) if z < 128 and z % 2 == 0 else 0 for z in range(256))
# A length of two bytes, read inline: hashes and most tensors. One that leads past the record is
# noticed at the end of it.
_TWO_BYTES = "elif b[i + 1] < 128 and not b[i] & 1:"
_LENGTH = "((b[i] & 127 | b[i + 1] << 7) >> 1)"
_SCOPE: dict[str, object] = {
    "ONE": _ONE_BYTE,
    "SHORT": _SHORT_TEXT,
    "read_long": read_long,
    "read_length": read_length,
    "read_count": read_count,
}


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
        self._skim = _compile(cls, self._wanted)

    def __call__(self, value: Buffer, schemas: Mapping[bytes, str] | None = None) -> Any:  # noqa: ANN401
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

    def _resolve(self, record: bytes, schemas: Mapping[bytes, str] | None) -> Any:  # noqa: ANN401
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


def _compile(cls: type, wanted: Wanted) -> Callable[[bytes, int], tuple[Any, int]]:
    emitter = _Emitter()
    emitter.source.add(0, "def skim(b, i):")
    targets = emitter.record(cls, wanted, 1)
    emitter.flush(1)
    emitter.source.add(1, f"return ({''.join(f'{t}, ' for t in targets)}), i")
    skim: Callable[[bytes, int], tuple[Any, int]]
    skim = emitter.source.function("skim", f"Avro skimmer of {cls.__name__}")
    return skim


class _Emitter:
    """Emits code by field; every piece of it moves `i` behind what it passed."""

    def __init__(self) -> None:
        self.source = Source(**_SCOPE)
        self._fixed = 0  # bytes of fixed length to step over, not yet emitted

    def flush(self, depth: int) -> None:
        """Emit the step over fields of fixed length."""
        if self._fixed:
            self.source.add(depth, f"i += {self._fixed}")
            self._fixed = 0

    def record(self, cls: type, wanted: Wanted, depth: int) -> list[str]:
        """Pass a record; the names that hold its wanted values, in order."""
        if unknown := wanted.keys() - {name for name, _ in fields_of(cls)}:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        targets: list[str] = []
        for name, kind in fields_of(cls):
            shape, inner = shape_of(kind)
            if name not in wanted:
                self._step(shape, inner, depth)
            elif shape == "record":
                targets += self.record(inner, wanted[name], depth)
            else:
                self.flush(depth)
                targets.append(self._read(shape, inner, wanted[name], depth))
        return targets

    def _read(self, shape: str, inner: Any, wanted: Wanted, depth: int) -> str:  # noqa: ANN401
        target, add = self.source.name(), self.source.add
        if shape == "long":
            add(depth, f"{target} = ONE[b[i]]", f"if {target} is None:")
            add(depth, f"    {target}, i = read_long(b, i)", "else:", "    i += 1")
        elif shape == "string":
            add(depth, "n = SHORT[b[i]]", "if n:", f"    {target} = b[i + 1:i + n]", "    i += n")
            add(depth, _TWO_BYTES, f"    n = {_LENGTH}", f"    {target} = b[i + 2:i + 2 + n]")
            add(depth + 1, "i += 2 + n")
            add(depth, "else:", "    n, i = read_length(b, i)")
            add(depth + 1, f"{target} = b[i:i + n]", "i += n")
        elif shape == "boolean":
            add(depth, f"{target} = b[i] == 1", "i += 1")
        elif shape == "array" and inner is int:
            add(depth, f"{target} = read_long(b, i + 1)[0] if b[i] else 0")
            self._step(shape, inner, depth)
        elif shape == "array" and wanted:
            add(depth, f"{target} = []")
            self._blocks(depth, lambda at: self._item(target, inner, wanted, at))
        else:
            raise TypeError(f"a field of shape {shape} cannot be skimmed")
        return target

    def _item(self, items: str, inner: type, wanted: Wanted, depth: int) -> None:
        values = self.record(inner, wanted, depth)
        self.flush(depth)
        self.source.add(depth, f"{items}.append(({''.join(f'{v}, ' for v in values)}))")

    def _step(self, shape: str, inner: Any, depth: int) -> None:  # noqa: ANN401
        """Pass one field unread."""
        add = self.source.add
        if shape in ("double", "boolean"):
            self._fixed += 8 if shape == "double" else 1
            return
        if shape == "record":
            self.record(inner, {}, depth)
            return
        self.flush(depth)
        if shape == "long":
            add(depth, "while b[i] > 127:", "    i += 1", "i += 1")
        elif shape in ("string", "bytes"):
            add(depth, "n = SHORT[b[i]]", "if n:", "    i += n")
            add(depth, _TWO_BYTES, f"    i += 2 + {_LENGTH}")
            add(depth, "else:", "    n, i = read_length(b, i)", "    i += n")
        elif shape == "array" and inner is int:
            add(depth, "if b[i] == 2 and b[i + 1] < 128 and not b[i + 2]:", "    i += 3")
            add(depth, "elif b[i] == 2 and b[i + 2] < 128 and not b[i + 3]:", "    i += 4")
            add(depth, "else:")
            self._blocks(depth + 1, lambda at: self._pass_item(inner, False, at))
        elif shape == "optional":
            add(depth, "n = b[i]", "i += 1", "if n == 2:")
            self._step(*shape_of(inner), depth + 1)
            self.flush(depth + 1)
            add(depth + 1, "pass")
            add(depth, "elif n:", "    raise ValueError(f'union branch {n} at byte {i - 1}')")
        else:
            is_map = shape == "map"
            self._blocks(depth, lambda at: self._pass_item(inner, is_map, at))

    def _pass_item(self, inner: Any, is_map: bool, depth: int) -> None:  # noqa: ANN401
        if is_map:
            self._step("string", str, depth)
        self._step(*shape_of(inner), depth)
        self.flush(depth)

    def _blocks(self, depth: int, item: Callable[[int], None]) -> None:
        """An array or a map: blocks of items until an empty one."""
        left, add = self.source.name(), self.source.add
        add(
            depth, "while True:", f"    {left} = ONE[b[i]]", f"    if {left} is None or {left} < 0:"
        )
        add(depth + 2, f"{left}, i = read_count(b, i)")
        add(depth + 1, "else:", "    i += 1", f"if not {left}:", "    break")
        add(depth + 1, f"for _ in range({left}):")
        item(depth + 2)
