"""Turn an event's dataclass into a function Avro bytes -> event.

Python source is generated once per class. Four things make it quick. One-byte integers and lengths
are looked up in a tuple. Repeated texts are interned straight from their bytes. Objects are filled
while they belong to an unfrozen twin class with the same `__slots__`, whose `__class__` is then set
(Python data model, "__slots__": allowed between classes of equal slots). And a run of steady fields
(`STEADY`) that stands in the record as it stood in an earlier one is recognised by one comparison:
equal bytes have equal values and end at the same place.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from schemas.shapes import fields_of, shape_of
from schemas.source import Source
from schemas.tensor import Buffer
from schemas.varint import read_count, read_length, read_long

Decoder = Callable[[Buffer, memoryview, int], tuple[Any, int]]

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower

# Fields with few values in a run, whatever its size: no lengths, no names of workers. Only speed
# hangs on this list.
STEADY = frozenset(
    {
        *("attempt", "group_size", "purpose", "author", "anchor", "dtype"),
        *("policy_version", "weight_hash", "temperature", "top_p", "top_k", "finish_reason"),
    }
)
_RUN_KEY = 8  # bytes by which earlier runs are found
_RUN_BYTES = 512  # longer runs are not kept
_RUN_CHOICES = 4  # earlier runs kept under one key

# By the first byte of an Avro long: its value, or None where more bytes follow.
_ONE_BYTE = (*((z >> 1) ^ -(z & 1) for z in range(128)), *(None for _ in range(128)))
# By the first byte of a text: bytes with the length byte, or 0: longer, negative, or more follow.
_SHORT_TEXT = tuple(1 + (z >> 1) if z < 128 and z % 2 == 0 else 0 for z in range(256))


def refuse(what: str, byte: int, i: int) -> bool:
    """A byte that stands for nothing."""
    raise ValueError(f"{what} at byte {i} is {byte}")


class _Texts(dict[bytes, str]):
    """Decoded short texts by their bytes, the length byte included."""

    def __missing__(self, encoded: bytes) -> str:
        text = encoded[1:].decode()
        if len(self) >= _TABLE_ENTRIES:
            self.clear()
        self[encoded] = text
        return text


_Runs = dict[bytes, tuple[tuple[Any, ...], ...]]  # key -> (bytes, their number, *values), ...


def read_longs(buf: Buffer, i: int) -> tuple[tuple[int, ...], int]:
    """An array of longs at `i`, most often a shape of one axis, and where it ends."""
    if buf[i] == 2:  # one item, as a shape of one axis has
        n, end = read_long(buf, i + 1)
        if buf[end] == 0:
            return (n,), end + 1
    longs: list[int] = []
    count, i = read_count(buf, i)
    while count:
        for _ in range(count):
            n, i = read_long(buf, i)
            longs.append(n)
        count, i = read_count(buf, i)
    return tuple(longs), i


def keep(runs: _Runs, b: bytes, start: int, end: int, values: tuple[object, ...]) -> None:
    """Remember what `b[start:end]` says, unless the record was cut within it."""
    if end > len(b) or end - start > _RUN_BYTES:
        return
    if len(runs) >= _TABLE_ENTRIES:
        runs.clear()
    key = b[start : start + _RUN_KEY]
    others = runs.get(key, ())[: _RUN_CHOICES - 1]
    runs[key] = ((b[start:end], end - start, *values), *others)


_SCOPE: dict[str, object] = {
    "ONE": _ONE_BYTE,
    "SHORT": _SHORT_TEXT,
    "TEXT": _Texts(),
    "keep": keep,
    "read_long": read_long,
    "read_length": read_length,
    "read_longs": read_longs,
    "read_count": read_count,
    "refuse": refuse,
}


def compile_decoder(cls: type, *, of_bytes: bool) -> Decoder:
    """A function (record, view of it, start) -> (event, end); `end` may lie past a cut record.

    Args:
        cls: the event.
        of_bytes: records are `bytes`; otherwise any buffer, without the short cuts.
    """
    reader = _Reader(of_bytes=of_bytes)
    reader.source.add(0, "def decode(b, view, i):")
    reader.record(cls, "event", 1)
    reader.flush(1)
    reader.source.add(1, "return event, i")
    decoder: Decoder = reader.source.function("decode", f"Avro decoder of {cls.__name__}")
    return decoder


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One field without control flow around it: its value goes to `target`."""

    target: str
    shape: str
    inner: Any
    steady: bool


class _Reader:
    """Emits code by field; every piece of it moves `i` behind what it read.

    Leaves wait in `_pending`, with the lines between them, until control flow needs them read:
    so neighbours become runs even across the border of a nested record.
    """

    def __init__(self, *, of_bytes: bool) -> None:
        self.source = Source(**_SCOPE)
        self._of_bytes = of_bytes
        self._pending: list[_Leaf | str] = []

    def record(self, cls: type, target: str, depth: int) -> None:
        twin, name = f"New{cls.__name__}", cls.__name__
        self.source.scope[name], self.source.scope[twin] = cls, _twin(cls)
        local = target if "." not in target else self.source.name()
        self.source.add(depth, f"{local} = {twin}()")
        for field, kind in fields_of(cls):
            self.field(kind, f"{local}.{field}", depth, steady=field in STEADY)
        self._pending.append(f"{local}.__class__ = {name}")
        if local != target:
            self._pending.append(f"{target} = {local}")

    def field(self, kind: Any, target: str, depth: int, *, steady: bool = False) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "record":
            self.record(inner, target, depth)
        elif shape == "optional":
            self.flush(depth)
            self.source.add(depth, "n = b[i]", "i += 1", "if n == 0:", f"    {target} = None")
            self.source.add(depth, "elif n == 2:")
            self.field(inner, target, depth + 1)
            self.flush(depth + 1)
            self.source.add(depth, "else:", "    refuse('union branch', n, i - 1)")
        elif shape == "map" or (shape == "array" and inner is not int):
            self.flush(depth)
            self._block(shape, inner, target, depth)
        else:
            self._pending.append(_Leaf(target, shape, inner, steady and self._of_bytes))

    def flush(self, depth: int) -> None:
        """Emit what is pending: steady neighbours as a run, neighbouring doubles as one call."""
        pending, self._pending = self._pending, []
        for (kind, steady), group in itertools.groupby(pending, _group):
            if kind == "line":
                self.source.add(depth, *cast("Iterable[str]", group))
            elif steady:
                self._run(list(cast("Iterable[_Leaf]", group)), depth)
            else:
                self._leaves(list(cast("Iterable[_Leaf]", group)), depth)

    def _run(self, leaves: list[_Leaf], depth: int) -> None:
        if len(leaves) == 1:
            self._leaves(leaves, depth)
            return
        runs, start = (self.source.name() for _ in range(2))
        self.source.scope[runs] = {}
        targets = ", ".join(leaf.target for leaf in leaves)
        self.source.add(depth, f"for hit in {runs}.get(b[i:i + {_RUN_KEY}], ()):")
        self.source.add(depth + 1, "if b.startswith(hit[0], i):", f"    _, n, {targets} = hit")
        self.source.add(depth + 2, "i += n", "break")
        self.source.add(depth, "else:", f"    {start} = i")
        for _, group in itertools.groupby(leaves, lambda leaf: leaf.shape == "double"):
            self._leaves(list(group), depth + 1)
        self.source.add(depth + 1, f"keep({runs}, b, {start}, i, ({targets}))")

    def _leaves(self, leaves: list[_Leaf], depth: int) -> None:
        if leaves[0].shape == "double":
            unpack = f"DOUBLES_{len(leaves)}"
            self.source.scope[unpack] = struct.Struct(f"<{len(leaves)}d").unpack_from
            targets = "".join(f"{leaf.target}, " for leaf in leaves)
            self.source.add(depth, f"{targets}= {unpack}(b, i)", f"i += {8 * len(leaves)}")
            return
        for leaf in leaves:
            self.source.add(depth, *self._scalar(leaf.shape, leaf.inner, leaf.target))

    def _scalar(self, shape: str, inner: Any, target: str) -> list[str]:  # noqa: ANN401
        if shape == "long":
            return [
                f"{target} = n = ONE[b[i]]",
                "if n is None:",
                f"    {target}, i = read_long(b, i)",
                "else:",
                "    i += 1",
            ]
        if shape == "array":
            return [f"{target}, i = read_longs(b, i)"]
        if shape == "boolean":
            return [
                f"{target} = b[i] == 1 or (b[i] != 0 and refuse('boolean', b[i], i))",
                "i += 1",
            ]
        if shape == "bytes":
            data = "bytes(view[i:j])" if inner is bytes else "view[i:j]"
            return ["n, i = read_length(b, i)", "j = i + n", f"{target} = {data}", "i = j"]
        piece = "b[i:j]" if self._of_bytes else "bytes(b[i:j])"
        return [
            "n = SHORT[b[i]]",
            "if n:",
            "    j = i + n",
            f"    {target} = TEXT[{piece}]",
            "else:",
            "    n, i = read_length(b, i)",
            "    j = i + n",
            f"    {target} = {piece}.decode()",
            "i = j",
        ]

    def _block(self, shape: str, inner: Any, target: str, depth: int) -> None:  # noqa: ANN401
        """An array or a map: blocks of items until an empty one."""
        items, left, item, key = (self.source.name() for _ in range(4))
        empty = "[]" if shape == "array" else "{}"
        self.source.add(depth, f"{items} = {empty}")
        self._count(left, depth)
        self.source.add(depth, f"while {left}:", f"    for _ in range({left}):")
        if shape == "map":
            self.field(str, key, depth + 2)
        self.field(inner, item, depth + 2)
        self.flush(depth + 2)
        keep_it = f"{items}.append({item})" if shape == "array" else f"{items}[{key}] = {item}"
        self.source.add(depth + 2, keep_it)
        self._count(left, depth + 1)
        self.source.add(depth, f"{target} = {f'tuple({items})' if shape == 'array' else items}")

    def _count(self, target: str, depth: int) -> None:
        self.source.add(depth, f"{target} = ONE[b[i]]", f"if {target} is None or {target} < 0:")
        self.source.add(depth, f"    {target}, i = read_count(b, i)", "else:", "    i += 1")


def _group(item: _Leaf | str) -> tuple[str, bool]:
    """What kind of neighbours an item may be emitted with."""
    if isinstance(item, str):
        return "line", False
    return "steady" if item.steady else str(item.shape == "double"), item.steady


def _twin(cls: Any) -> type:  # noqa: ANN401
    """A class with the slots of `cls` whose instances can still be written to."""
    if hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__name__} checks itself at birth; decoding would step around that")
    return type(f"New{cls.__name__}", (), {"__slots__": cls.__slots__})
