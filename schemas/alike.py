"""Arrays of records without branches: items whose fields have the sizes of their neighbour's.

The samples of a step are alike: groups of as many digits, offsets of as many bytes. Code generated
for such sizes unpacks an item at once and looks its integers and texts up; each look-up fails where
a field has another size. Fields whose sizes are mixed are read one by one in between. What does not
fit is left to the decoder of any item, which alone judges.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from rlstreams.schemas.leaves import SCOPE, Leaf, leaf_lines
from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.schemas.source import SHORT_TEXT, SIGNED, Source
from rlstreams.schemas.varint import read_long

Decoder = Callable[[bytes, memoryview, int], tuple[Any, int]]
Line = Callable[[bytes, int, int, list[Any]], int]
Sizes = tuple[int, ...]

_FEW = 8  # items; fewer are not worth a line
_MAX_STOPS = 8  # items of one array that did not fit; then no size is expected in it
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
    "NoFit": (LookupError, ValueError, struct.error),
}


def is_plain(cls: type) -> bool:
    """Whether records of `cls` can be read so: texts, integers and doubles only."""
    return all(shape_of(kind)[0] in ("string", "long", "double") for _, kind in fields_of(cls))


class Alike:
    """Reads the items of one array.

    Args:
        cls: of the items; `is_plain`.
        decode: reads any item.
    """

    def __init__(self, cls: type, decode: Decoder) -> None:
        self._cls = cls
        self._fields = [(name, shape_of(kind)[0]) for name, kind in fields_of(cls)]
        self._decode = decode
        self._lines: dict[Sizes, Line] = {}
        # The line for the latest items, and the sizes that it expects: set together, for threads.
        self._latest: tuple[Sizes, Line] = ((), _nothing)

    def read(self, b: bytes, i: int, left: int, items: list[Any]) -> int:
        """Append the `left` items that begin at `i`; where they end. Errors are the decoder's."""
        is_worth_it, num_stops = left >= _FEW, 0
        while left:
            num_before = len(items)
            if is_worth_it:
                i = self._latest[1](b, i, left, items)
                left -= len(items) - num_before
                if not left:
                    break
            start = i
            item, i = self._decode(b, _NO_VIEW, i)
            items.append(item)
            left -= 1
            if is_worth_it:
                num_stops += 1
                self._learn(b, start, num_stops)
        return i

    def _learn(self, b: bytes, i: int, num_stops: int) -> None:
        """Take a line for the item at `i`, where the latest one stopped.

        The first stop in an array may be a border that all behind it are beyond; what differs from
        then on is a mixture, and read field by field (size 0).
        """
        sizes = self._sizes(b, i)
        if num_stops > 1:
            latest = self._latest[0]
            sizes = tuple(n if n == m else 0 for n, m in zip(sizes, latest, strict=True))
        is_known = sizes in self._lines
        if num_stops > _MAX_STOPS or not (is_known or len(self._lines) < _MAX_LINES - 1):
            sizes = (0,) * len(sizes)
        if sizes not in self._lines:
            self._lines[sizes] = self._compiled(sizes)
        self._latest = sizes, self._lines[sizes]

    def _sizes(self, b: bytes, i: int) -> Sizes:
        """Of the fields of an item that was read; 0: too long to be looked up."""
        sizes = []
        for _, shape in self._fields:
            if shape == "string":
                size = SHORT_TEXT[b[i]]
                num_bytes = size or sum(read_long(b, i)) - i
            else:
                num_bytes = 8 if shape == "double" else read_long(b, i)[1] - i
                size = num_bytes if shape == "double" or num_bytes in _LONGS else 0
            sizes.append(size)
            i += num_bytes
        return tuple(sizes)

    def _compiled(self, sizes: Sizes) -> Line:
        source = Source(**SCOPE, **_TABLES)
        source.add(0, "def line(b, i, left, items):", "    try:", "        for _ in range(left):")
        source.add(3, "start = i", f"item = {source.twin(self._cls)}()")
        fields = zip(self._fields, sizes, strict=True)
        for is_told, group in itertools.groupby(fields, lambda field: field[1] > 0):
            if is_told:
                source.add(3, *_unpacked(source, list(group)))
            else:
                leaves = [Leaf(f"item.{name}", shape) for (name, shape), _ in group]
                source.add(3, *leaf_lines(leaves, source))
        source.add(3, f"item.__class__ = {self._cls.__name__}", "items.append(item)")
        source.add(1, "except NoFit:", "    return start", "return i")
        line: Line = source.function("line", f"Avro decoder of {self._cls.__name__} {sizes}")
        return line


def _unpacked(source: Source, fields: Sequence[tuple[tuple[str, str], int]]) -> list[str]:
    """Code that reads neighbouring fields of these sizes."""
    formats, unpacked, lines = "<", [], []
    for (name, shape), size in fields:
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
    unpack = source.name()
    source.scope[unpack] = struct.Struct(formats).unpack_from
    size = sum(size for _, size in fields)
    return [f"{', '.join(unpacked)}, = {unpack}(b, i)", *lines, f"i += {size}"]


def _nothing(b: bytes, i: int, left: int, items: list[Any]) -> int:
    """The line before any was made: it fits no item."""
    return i
