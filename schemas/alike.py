"""Arrays of records without branches: items whose fields have the sizes of their neighbour's.

The samples of a step are alike: groups of as many digits, offsets of as many bytes. Code generated
for such sizes unpacks an item at once and looks its integers and texts up; each look-up fails where
a field has another size. What does not fit is left to the decoder of any item, which alone judges.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from schemas.shapes import fields_of, shape_of
from schemas.source import SHORT_TEXT, SIGNED, Source
from schemas.varint import read_long

Line = Callable[[bytes, int, int, list[Any]], int]
Sizes = tuple[int, ...]

_FEW = 8  # items; fewer are not worth a line
_MISSES = 3  # items in one array that are not as the one before them: the rest is a mixture
_MAX_LINES = 64  # ever, for one array of a schema: compiling takes a millisecond
_NO_VIEW = memoryview(b"")  # such records have no bytes to look at


class _Pair(dict[int, int]):
    """What two neighbouring bytes of an integer say, by the number that they unpack to."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self._is_first, self._is_last = is_first, is_last

    def __missing__(self, two: int) -> int:
        low, high = two & 255, two >> 8
        if low < 128 or (high < 128) != self._is_last:
            raise KeyError(two)
        z = low & 127 | (high & 127) << 7
        if not self._is_first:
            value = z << 13
        elif self._is_last:
            value = z >> 1 ^ -(z & 1)
        elif z & 1:
            raise KeyError(two)  # a negative number: rare, and no sum of its parts
        else:
            value = z >> 1
        self[two] = value
        return value


# By size: what to unpack, and the table for each part of it.
_LONGS = {
    1: ("B", ("SIGNED",)),
    2: ("H", ("TWO",)),
    3: ("HB", ("LOW", "TOP")),
    4: ("HH", ("LOW", "LAST")),
}
_TABLES: dict[str, object] = {
    "SIGNED": SIGNED,
    "TWO": _Pair(is_first=True, is_last=True),
    "LOW": _Pair(is_first=True, is_last=False),
    "LAST": _Pair(is_first=False, is_last=True),
    "TOP": tuple(byte << 13 for byte in range(128)),
    "NoFit": (LookupError, struct.error),
}


def is_plain(cls: type) -> bool:
    """Whether records of `cls` can be read so: texts, integers and doubles only."""
    return all(shape_of(kind)[0] in ("string", "long", "double") for _, kind in fields_of(cls))


class Alike:
    """Reads the items of one array.

    Args:
        cls: of the items; `is_plain`.
        decode: reads any item.
        texts: short texts by their bytes with the length byte; LookupError: of another length.
    """

    def __init__(
        self,
        cls: type,
        decode: Callable[[bytes, memoryview, int], tuple[Any, int]],
        texts: Mapping[bytes, str],
    ) -> None:
        self._cls = cls
        self._decode = decode
        self._texts = texts
        self._lines: dict[Sizes, Line] = {}
        self._line: Line = _nothing

    def read(self, b: bytes, i: int, left: int, items: list[Any]) -> int:
        """Append the `left` items that begin at `i`; where they end. Errors are the decoder's."""
        num_misses = _MISSES if left < _FEW else 0
        while left:
            num_before = len(items)
            if num_misses < _MISSES:
                i = self._line(b, i, left, items)
                left -= len(items) - num_before
            is_miss = len(items) == num_before
            num_misses += is_miss
            for _ in range(left if num_misses > _MISSES else min(left, 1)):
                start = i
                item, i = self._decode(b, _NO_VIEW, i)
                items.append(item)
                left -= 1
            if is_miss and num_misses <= _MISSES:
                self._line = self._line_as(b, start)
        return i

    def _line_as(self, b: bytes, i: int) -> Line:
        """For items like the one at `i`, which was read."""
        sizes = []
        for _, kind in fields_of(self._cls):
            shape = shape_of(kind)[0]
            if shape == "string":
                size = SHORT_TEXT[b[i]]
            else:
                size = 8 if shape == "double" else read_long(b, i)[1] - i
            if not size or (shape == "long" and size not in _LONGS):
                return _nothing
            sizes.append(size)
            i += size
        found = tuple(sizes)
        if found not in self._lines and len(self._lines) < _MAX_LINES:
            self._lines[found] = self._compiled(found)
        return self._lines.get(found, _nothing)

    def _compiled(self, sizes: Sizes) -> Line:
        source = Source(**_TABLES, TEXT=self._texts)
        new, formats = source.twin(self._cls), "<"
        unpacked: list[str] = []
        lines: list[str] = []
        for (name, kind), size in zip(fields_of(self._cls), sizes, strict=True):
            shape = shape_of(kind)[0]
            if shape == "double":
                formats += "d"
                unpacked.append(f"item.{name}")
                continue
            format_, tables = (f"{size}s", ("TEXT",)) if shape == "string" else _LONGS[size]
            formats += format_
            parts = [source.name() for _ in tables]
            unpacked += parts
            said = [f"{table}[{part}]" for table, part in zip(tables, parts, strict=True)]
            lines.append(f"item.{name} = {' + '.join(said)}")
        source.scope["UNPACK"] = struct.Struct(formats).unpack_from
        source.add(0, "def line(b, i, left, items):", "    try:")
        source.add(2, "for _ in range(left):", f"    item = {new}()")
        source.add(3, f"{', '.join(unpacked)}, = UNPACK(b, i)", *lines)
        source.add(3, f"item.__class__ = {self._cls.__name__}", "items.append(item)")
        source.add(3, f"i += {sum(sizes)}")
        source.add(1, "except NoFit:", "    pass", "return i")
        line: Line = source.function("line", f"Avro decoder of {self._cls.__name__} {sizes}")
        return line


def _nothing(b: bytes, i: int, left: int, items: list[Any]) -> int:
    """The line before any was made: it fits no item."""
    return i
