"""Generate a function that reads the wanted fields of an event's bytes and steps over the rest.

A field costs a few steps of Python, so what stands before a tensor's data (dtype, shape, codec,
length) is passed by one look-up of its bytes where an earlier tensor began with the same
(`schemas.runs`): the arrays of a sample's tokens do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.runs import keep, run_tables
from schemas.shapes import fields_of, shape_of
from schemas.source import SHORT_TEXT, UNSIGNED, Source, refuse
from schemas.tensor import Tensor
from schemas.varint import TIME_LOWER, TIME_UPPER, read_count, read_long, read_unsigned

Wanted = dict[str, "Wanted"]  # by field; an empty one is a leaf

_ONE_BYTE = (*((z >> 1) ^ -(z & 1) for z in range(128)), *(None for _ in range(128)))
# A length that leads past the record is noticed at the end of it.
_LENGTH = (*UNSIGNED, "if n & 1:", "    refuse('length', n, i)", "n >>= 1")


def read_first(b: bytes, i: int, count: int) -> tuple[int, int]:
    """The first item of an array of longs (0: none) and its end; its first block is at `i`."""
    first = read_long(b, i)[0] if count else 0
    while count:
        for _ in range(count):
            _, i = read_long(b, i)
        count, i = read_count(b, i)
    return first, i


_SCOPE: dict[str, object] = {
    "ONE": _ONE_BYTE,
    "SHORT": SHORT_TEXT,
    "LOWER": TIME_LOWER,
    "UPPER": TIME_UPPER,
    "keep": keep,
    "read_count": read_count,
    "read_first": read_first,
    "read_long": read_long,
    "read_unsigned": read_unsigned,
    "refuse": refuse,
}


def compile_skimmer(cls: type, wanted: Wanted) -> Callable[[bytes, int], tuple[Any, int]]:
    """A function (record, start) -> (wanted values, end); `end` may lie past a cut record.

    Raises:
        TypeError: a field that the event does not have, or of a shape that cannot be skimmed.
    """
    emitter = _Emitter()
    emitter.source.add(0, "def skim(b, i):")
    targets = emitter.record(cls, wanted, 1)
    emitter.flush(1)
    emitter.source.add(1, f"return {_tuple(targets)}, i")
    skim: Callable[[bytes, int], tuple[Any, int]]
    skim = emitter.source.function("skim", f"Avro skimmer of {cls.__name__}")
    return skim


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A field without control flow around it; its value goes to `target`, "" where not wanted."""

    target: str
    shape: str


class _Emitter:
    """Emits code by field; every piece of it moves `i` behind what it passed.

    Leaves wait in `_pending` until control flow needs them passed.
    """

    def __init__(self) -> None:
        tensors, sizes = run_tables()
        self.source = Source(**_SCOPE, TENSORS=tensors, SIZES=sizes)
        self._pending: list[_Leaf] = []

    def record(self, cls: type, wanted: Wanted, depth: int) -> list[str]:
        """Pass a record; the names that hold its wanted values, in order."""
        if unknown := wanted.keys() - {name for name, _ in fields_of(cls)}:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        if cls is Tensor:
            return self._tensor(wanted, depth)
        targets: list[str] = []
        for name, kind in fields_of(cls):
            targets += self._field(name, kind, wanted.get(name), depth)
        return targets

    def _field(self, name: str, kind: Any, wanted: Wanted | None, depth: int) -> list[str]:  # noqa: ANN401
        shape, inner = shape_of(kind)
        is_wanted = wanted is not None
        if shape == "record":
            return self.record(inner, wanted or {}, depth)
        if shape in ("long", "string", "boolean") or not is_wanted:
            target = self.source.name() if is_wanted else ""
            what = "time" if shape == "long" and name.endswith("_ms") else shape
            self._step(what, inner, depth, target)
            return [target] if is_wanted else []
        if shape == "array" and inner is int:
            return [self._first(depth, self.source.name())]
        if shape == "array" and wanted:
            return [self._items(inner, wanted, depth)]
        raise TypeError(f"a field of shape {shape} cannot be skimmed")

    def flush(self, depth: int) -> None:
        """Emit what is pending; neighbours of fixed length are one step."""
        num_fixed = 0  # bytes to step over, not yet emitted
        for leaf in self._pending:
            if leaf.shape in ("double", "boolean") and not leaf.target:
                num_fixed += 8 if leaf.shape == "double" else 1
                continue
            step = [f"i += {num_fixed}"] if num_fixed else []
            num_fixed = 0
            self.source.add(depth, *step, *_lines(leaf))
        if num_fixed:
            self.source.add(depth, f"i += {num_fixed}")
        self._pending.clear()

    def _leaf(self, target: str, shape: str) -> None:
        self._pending.append(_Leaf(target, shape))

    def _step(
        self,
        shape: str,
        inner: Any,  # noqa: ANN401
        depth: int,
        target: str = "",
    ) -> None:
        """Pass one field."""
        if shape == "record":
            self.record(inner, {}, depth)
        elif shape == "optional":
            self._optional(inner, depth)
        elif shape == "array" and inner is int:
            self._first(depth, "_")
        elif shape in ("array", "map"):
            self._blocks(depth, lambda at: self._pass_item(inner, shape == "map", at))
        else:
            self._leaf(target, shape)

    def _tensor(self, wanted: Wanted, depth: int) -> list[str]:
        """Told by the bytes before its data; all tensors of an event have one table."""
        if other := wanted.keys() - {"shape"}:
            raise TypeError(f"of a tensor only the shape can be skimmed, not {', '.join(other)}")
        self.flush(depth)
        length, count, add = self.source.name(), self.source.name(), self.source.add
        add(depth, "for n in SIZES[b[i]]:", "    hit = TENSORS.get(b[i:i + n])")
        add(depth + 1, "if hit is not None:", f"    {length}, n = hit", "    i += n", "    break")
        add(depth, "else:", "    start = i")
        self._leaf("", "string")
        self._leaf(count, "count")
        self.flush(depth + 1)
        add(depth + 1, f"{length}, i = read_first(b, i, {count})")
        self._leaf("", "string")
        self.flush(depth + 1)
        add(depth + 1, *_LENGTH, f"keep(TENSORS, SIZES, b, start, i, ({length}, i + n - start))")
        add(depth + 1, "i += n")
        return [length] if wanted else []

    def _first(self, depth: int, target: str) -> str:
        count = self.source.name()
        self._leaf(count, "count")
        self.flush(depth)
        self.source.add(depth, f"{target}, i = read_first(b, i, {count})")
        return target

    def _optional(self, inner: Any, depth: int) -> None:  # noqa: ANN401
        branch = self.source.name()
        self._leaf(branch, "branch")
        self.flush(depth)
        self.source.add(depth, f"if {branch} == 2:")
        self._step(*shape_of(inner), depth + 1)
        self.flush(depth + 1)
        self.source.add(depth, f"elif {branch}:", f"    refuse('union branch', {branch}, i - 1)")

    def _items(self, inner: type, wanted: Wanted, depth: int) -> str:
        items = self.source.name()
        self.flush(depth)
        self.source.add(depth, f"{items} = []")

        def item(at: int) -> None:
            values = self.record(inner, wanted, at)
            self.flush(at)
            self.source.add(at, f"{items}.append({_tuple(values)})")

        self._blocks(depth, item)
        return items

    def _pass_item(self, inner: Any, is_map: bool, depth: int) -> None:  # noqa: ANN401
        if is_map:
            self._leaf("", "string")
        self._step(*shape_of(inner), depth)
        self.flush(depth)

    def _blocks(self, depth: int, item: Callable[[int], None]) -> None:
        """An array or a map: blocks of items until an empty one."""
        left = self.source.name()
        self._leaf(left, "count")
        self.flush(depth)
        self.source.add(depth, f"while {left}:", f"    for _ in range({left}):")
        item(depth + 2)
        self._leaf(left, "count")
        self.flush(depth + 1)


_BRANCH = ("{t} = b[i]", "i += 1")
_BOOLEAN = ("{t} = b[i] == 1", "i += 1")
_COUNT = (
    "{t} = ONE[b[i]]",
    "if {t} is None or {t} < 0:",
    "    {t}, i = read_count(b, i)",
    "else:",
    "    i += 1",
)
_TIME = (
    "{t} = LOWER[b[i:i + 2]] + UPPER[b[i + 2:i + 6]]",
    "if {t} < 0:",
    "    {t}, i = read_long(b, i)",
    "else:",
    "    i += 6",
)
_LONG = (
    "{t} = ONE[b[i]]",
    "if {t} is None:",
    "    {t}, i = read_long(b, i)",
    "else:",
    "    i += 1",
)
_PAST_LONG = (
    *("if b[i] < 128:", "    i += 1", "elif b[i + 1] < 128:", "    i += 2", "else:", "    i += 2"),
    *("    while b[i] > 127:", "        i += 1", "    i += 1"),
)
_OTHER = ("else:", *(f"    {line}" for line in _LENGTH))
_TEXT = (
    *("n = SHORT[b[i]]", "if n:", "    {t} = b[i + 1:i + n]", "    i += n"),
    *(*_OTHER, "    {t} = b[i:i + n]", "    i += n"),
)
_PAST_TEXT = ("n = SHORT[b[i]]", "if n:", "    i += n", *_OTHER, "    i += n")
_WANTED = {
    "branch": _BRANCH,
    "boolean": _BOOLEAN,
    "count": _COUNT,
    "time": _TIME,
    "long": _LONG,
    "string": _TEXT,
}
_PAST = {"time": _TIME, "long": _PAST_LONG, "string": _PAST_TEXT, "bytes": (*_LENGTH, "i += n")}


def _lines(leaf: _Leaf) -> Sequence[str]:
    """Code that passes one leaf."""
    lines = (_WANTED if leaf.target else _PAST)[leaf.shape]
    return [line.replace("{t}", leaf.target or "n") for line in lines]
