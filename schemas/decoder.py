"""Turn an event's dataclass into a function Avro bytes -> event.

Python source is generated once per class. Four things make it quick. Integers of up to three bytes
are read in line. Repeated texts are interned straight from their bytes. Objects are filled while
they belong to an unfrozen twin class with the same `__slots__`, whose `__class__` is then set
(Python data model, "__slots__": allowed between classes of equal slots). And a run of steady fields
(`STEADY`, union branches, counts) that stands in the record as it stood in an earlier one is found
by one look-up: equal bytes have equal values and end at the same place. So is what stands before
a tensor's data.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from schemas.runs import STEADY, keep, run_tables
from schemas.shapes import fields_of, shape_of
from schemas.source import LENGTH, SHORT_TEXT, UNSIGNED, Source, refuse
from schemas.tensor import Buffer, Tensor
from schemas.varint import TIME_LOWER, TIME_UPPER, read_count, read_long, read_unsigned

Decoder = Callable[[Buffer, memoryview, int], tuple[Any, int]]

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower


class _Texts(dict[bytes, str]):
    """Decoded short texts by their bytes, the length byte included."""

    def __missing__(self, encoded: bytes) -> str:
        text = encoded[1:].decode()
        if len(self) >= _TABLE_ENTRIES:
            self.clear()
        self[encoded] = text
        return text


def read_longs(buf: Buffer, i: int, count: int) -> tuple[tuple[int, ...], int]:
    """An array of longs, of which a first block of `count` begins at `i`, and where it ends."""
    longs: list[int] = []
    while count:
        for _ in range(count):
            n, i = read_long(buf, i)
            longs.append(n)
        count, i = read_count(buf, i)
    return tuple(longs), i


_SCOPE: dict[str, object] = {
    "SHORT": SHORT_TEXT,
    "TEXT": _Texts(),
    "keep": keep,
    "read_long": read_long,
    "LOWER": TIME_LOWER,
    "UPPER": TIME_UPPER,
    "read_unsigned": read_unsigned,
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
        heads, sizes = run_tables()
        self.source = Source(**_SCOPE, HEADS=heads, HEAD_SIZES=sizes)
        self._of_bytes = of_bytes
        self._pending: list[_Leaf | str] = []

    def record(self, cls: type, target: str, depth: int) -> None:
        twin, name = f"New{cls.__name__}", cls.__name__
        self.source.scope[name], self.source.scope[twin] = cls, _twin(cls)
        local = target if "." not in target else self.source.name()
        self.source.add(depth, f"{local} = {twin}()")
        if cls is Tensor:
            self._tensor(local, depth)
        else:
            for field, kind in fields_of(cls):
                self.field(kind, f"{local}.{field}", depth, steady=field in STEADY)
        self._pending.append(f"{local}.__class__ = {name}")
        if local != target:
            self._pending.append(f"{target} = {local}")

    def _tensor(self, local: str, depth: int) -> None:
        """Told by the bytes before its data, which the arrays of a sample's tokens share."""
        self.flush(depth)
        fields = ", ".join(f"{local}.{name}" for name in ("dtype", "shape", "codec"))
        count, start, add = self.source.name(), self.source.name(), self.source.add
        at = depth
        if self._of_bytes:
            add(depth, "for n in HEAD_SIZES[b[i]]:", "    hit = HEADS.get(b[i:i + n])")
            add(depth + 1, "if hit:", f"    {fields}, j = hit", "    i += n", "    j += i")
            add(depth + 2, "break")
            add(depth, "else:", f"    {start} = i")
            at = depth + 1
        add(at, *self._text(f"{local}.dtype"))
        add(at, *self._scalar("count", None, count))
        add(at, f"{local}.shape, i = read_longs(b, i, {count})")
        add(at, *self._text(f"{local}.codec"), *LENGTH)
        if self._of_bytes:
            add(at, f"keep(HEADS, HEAD_SIZES, b, {start}, i, ({fields}, j - i))")
        add(depth, f"{local}.data = view[i:j]", "i = j")

    def field(self, kind: Any, target: str, depth: int, *, steady: bool = False) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "record":
            self.record(inner, target, depth)
        elif shape == "optional":
            self._optional(inner, target, depth)
        elif shape == "array" and inner is int:
            self._longs(target, depth)
        elif shape in ("array", "map"):
            self._block(shape, inner, target, depth)
        else:
            self._leaf(target, shape, inner, steady=steady)

    def _leaf(self, target: str, shape: str, inner: Any = None, *, steady: bool = True) -> None:  # noqa: ANN401
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
        runs, sizes, start = (self.source.name() for _ in range(3))
        self.source.scope |= dict(zip((runs, sizes), run_tables(), strict=True))
        targets = ", ".join(leaf.target for leaf in leaves)
        self.source.add(depth, f"for n in {sizes}[b[i]]:", f"    hit = {runs}.get(b[i:i + n])")
        self.source.add(depth + 1, "if hit:", f"    {targets} = hit", "    i += n", "    break")
        self.source.add(depth, "else:", f"    {start} = i")
        for _, group in itertools.groupby(leaves, lambda leaf: leaf.shape == "double"):
            self._leaves(list(group), depth + 1)
        self.source.add(depth + 1, f"keep({runs}, {sizes}, b, {start}, i, ({targets}))")

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
        match shape:
            case "long" if self._of_bytes and target.endswith("_ms"):
                clock = f"{target} = n = LOWER[b[i:i + 2]] + UPPER[b[i + 2:i + 6]]"
                other = f"    {target}, i = read_long(b, i)"
                lines = [clock, "if n < 0:", other, "else:", "    i += 6"]
            case "long":
                lines = [*UNSIGNED, f"{target} = n >> 1 ^ -(n & 1)"]
            case "count":
                sized = ["if n & 1:  # negative: a size in bytes follows", f"    {target} += 1"]
                lines = [*UNSIGNED, f"{target} = n >> 1", *sized, "    _, i = read_long(b, i)"]
            case "branch":
                lines = [f"{target} = b[i]", "i += 1"]
            case "boolean":
                other = "(b[i] != 0 and refuse('boolean', b[i], i))"
                lines = [f"{target} = b[i] == 1 or {other}", "i += 1"]
            case "bytes":
                data = "bytes(view[i:j])" if inner is bytes else "view[i:j]"
                lines = [*LENGTH, f"{target} = {data}", "i = j"]
            case _:
                lines = self._text(target)
        return lines

    def _text(self, target: str) -> list[str]:
        piece = "b[i:j]" if self._of_bytes else "bytes(b[i:j])"
        short = ["n = SHORT[b[i]]", "if n:", "    j = i + n", f"    {target} = TEXT[{piece}]"]
        long = [f"    {line}" for line in (*LENGTH, f"{target} = {piece}.decode()")]
        return [*short, "else:", *long, "i = j"]

    def _optional(self, inner: Any, target: str, depth: int) -> None:  # noqa: ANN401
        branch = self.source.name()
        self._leaf(branch, "branch")
        self.flush(depth)
        self.source.add(depth, f"if {branch} == 0:", f"    {target} = None")
        self.source.add(depth, f"elif {branch} == 2:")
        self.field(inner, target, depth + 1)
        self.flush(depth + 1)
        self.source.add(depth, "else:", f"    refuse('union branch', {branch}, i - 1)")

    def _longs(self, target: str, depth: int) -> None:
        count = self.source.name()
        self._leaf(count, "count")
        self._pending.append(f"{target}, i = read_longs(b, i, {count})")

    def _block(self, shape: str, inner: Any, target: str, depth: int) -> None:  # noqa: ANN401
        """An array or a map: blocks of items until an empty one."""
        items, left, item, key = (self.source.name() for _ in range(4))
        self._leaf(left, "count")
        self.flush(depth)
        self.source.add(depth, f"{items} = {'[]' if shape == 'array' else '{}'}")
        self.source.add(depth, f"while {left}:", f"    for _ in range({left}):")
        if shape == "map":
            self.field(str, key, depth + 2)
        self.field(inner, item, depth + 2)
        self.flush(depth + 2)
        keep_it = f"{items}.append({item})" if shape == "array" else f"{items}[{key}] = {item}"
        self.source.add(depth + 2, keep_it)
        self._leaf(left, "count", steady=False)
        self.flush(depth + 1)
        self.source.add(depth, f"{target} = {f'tuple({items})' if shape == 'array' else items}")


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
