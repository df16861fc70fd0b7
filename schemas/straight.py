"""Decoders without branches and loops, for records that are outlined alike.

The outline of a record is what its control flow depends on: counts, union branches, whether times
have the size that times have. Records of a stream have few outlines, and for each of them a
straight line of code is generated: runs of fields that repeat from record to record (`STEADY`,
and all that the outline tells) are found by one look-up of their bytes, whatever borders of
segments and tensors lie between; only the fields that differ are read. See `schemas.runs` for why
that cannot mislead. A record of another outline, and one with anything wrong, is left to the
decoder of all records (`OtherOutlineError`).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlstreams.schemas.leaves import SCOPE, Leaf, leaf_lines
from rlstreams.schemas.runs import STEADY, Found, OtherOutlineError, Run, Sizes, TensorHeaders
from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.schemas.source import Source
from rlstreams.schemas.tensor import Tensor
from rlstreams.schemas.varint import FIRST_TWO_BYTES, LAST_FOUR_BYTES, is_clock, long_bytes

Outline = tuple[int, ...]
Straight = Callable[[bytes, memoryview, int], tuple[Any, int]]


def outline_of(cls: type, event: Any) -> Iterator[int]:  # noqa: ANN401
    """Counts, branches (0 or 1) and sizes of times (0 or 1), in the order of the fields."""
    for name, kind in fields_of(cls):
        if cls is not Tensor:
            yield from _outline_of_field(name, kind, getattr(event, name))


def _outline_of_field(name: str, kind: Any, value: Any) -> Iterator[int]:  # noqa: ANN401
    shape, inner = shape_of(kind)
    if shape == "record":
        yield from outline_of(inner, value)
    elif shape == "optional":
        yield int(value is not None)
        if value is not None:
            yield from _outline_of_field(name, inner, value)
    elif shape in ("array", "map"):
        yield len(value)
        for item in value.values() if shape == "map" else value:
            yield from _outline_of_field("", inner, item)
    elif shape == "long" and name.endswith("_ms"):
        yield int(is_clock(value))


def compile_straight(cls: type, outline: Outline) -> Straight:
    """A function (record, view of it, start) -> (event, end), for records of this outline.

    It raises OtherOutlineError, or what reading damaged bytes raises, of any other record.
    """
    line = _Line(outline)
    line.source.add(0, "def decode(b, view, i):")
    line.record(cls, "event")
    line.finish()
    function: Straight = line.source.function("decode", f"Avro decoder of {cls.__name__} {outline}")
    return function


@dataclass(frozen=True, slots=True)
class _Known:
    """Bytes that the outline tells."""

    encoded: bytes


@dataclass(frozen=True, slots=True)
class _Steady:
    """A field that takes few values."""

    target: str
    shape: str


_TENSOR_HEADERS = TensorHeaders()  # of the tensors of all events


class _Line:
    """Emits code by field, in order. Objects are made first and get their class last."""

    def __init__(self, outline: Outline) -> None:
        self.source = Source(
            **SCOPE,
            FIRST=FIRST_TWO_BYTES,
            LAST=LAST_FOUR_BYTES,
            OtherOutlineError=OtherOutlineError,
        )
        self._outline = iter(outline)
        self._run: list[_Known | _Steady] = []
        self._differ: list[Leaf] = []  # neighbours
        self._last: list[str] = []
        self._num_looks = 0

    def record(self, cls: type, target: str) -> None:
        local = target if "." not in target else self.source.name()
        self.source.add(1, f"{local} = {self.source.twin(cls)}()")
        if cls is Tensor:
            self._tensor(local)
        else:
            for name, kind in fields_of(cls):
                self._field(name, kind, f"{local}.{name}")
        self._last.append(f"{local}.__class__ = {cls.__name__}")
        if local != target:
            self._last.append(f"{target} = {local}")

    def _field(self, name: str, kind: Any, target: str) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "record":
            self.record(inner, target)
        elif shape == "optional":
            is_there = next(self._outline)
            self._known(b"\x02" if is_there else b"\x00")
            if is_there:
                self._field(name, inner, target)
            else:
                self._last.append(f"{target} = None")
        elif shape in ("array", "map"):
            self._items(shape, inner, target)
        elif shape == "long" and name.endswith("_ms"):
            self._differs(Leaf(target, "clock" if next(self._outline) else "long"))
        elif name in STEADY and shape in Run.SHAPES:
            self._flush_differing()
            self._run.append(_Steady(target, shape))
        else:
            self._differs(Leaf(target, shape, inner))

    def _items(self, shape: str, inner: Any, target: str) -> None:  # noqa: ANN401
        """An array or a map of as many items as the outline says."""
        count = next(self._outline)
        items = [self.source.name() for _ in range(count)]
        keys = [self.source.name() for _ in range(count)]
        self._known(long_bytes(count) if count else b"")
        for item, key in zip(items, keys, strict=True):
            if shape == "map":
                self._flush_differing()
                self._run.append(_Steady(key, "string"))
            self._field("", inner, item)
        self._known(b"\x00")
        pairs = zip(keys, items, strict=True)
        made = (
            f"({''.join(f'{item}, ' for item in items)})"
            if shape == "array"
            else f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
        )
        self._last.append(f"{target} = {made}")

    def _tensor(self, local: str) -> None:
        """Told by the bytes before its data, which the arrays of a sample's tokens share."""
        self._flush()
        sizes = Sizes()
        values = f"j, {local}.dtype, {local}.shape, {local}.codec"
        self._look(values, _TENSOR_HEADERS.get, sizes, partial(_TENSOR_HEADERS.read, sizes))
        self.source.add(1, "j += i", f"{local}.data = view[i:j]", "i = j")

    def _look(
        self,
        targets: str,
        find: Callable[[bytes], Found | None],
        sizes: Sizes,
        read: Callable[[bytes, int], Found],
    ) -> None:
        """One look-up, a second one if the size was another, else reading."""
        self._num_looks += 1
        find_, read_, one, two = (f"{name}_{self._num_looks}" for name in ("FIND", "READ", *"AB"))
        self.source.scope |= {find_: find, read_: read, one: sizes.one, two: sizes.two}
        tries = " or ".join(f"{find_}(b[i:i + {size}[b[i]]])" for size in (one, two))
        self.source.add(1, f"n, {targets} = {tries} or {read_}(b, i)", "i += n")

    def _known(self, encoded: bytes) -> None:
        self._flush_differing()
        self._run.append(_Known(encoded))

    def _differs(self, leaf: Leaf) -> None:
        self._flush_run()
        self._differ.append(leaf)

    def _flush(self) -> None:
        self._flush_run()
        self._flush_differing()

    def _flush_run(self) -> None:
        run, self._run = self._run, []
        steady = [leaf for leaf in run if isinstance(leaf, _Steady)]
        if steady:
            found = Run([leaf.encoded if isinstance(leaf, _Known) else leaf.shape for leaf in run])
            targets = ", ".join(leaf.target for leaf in steady)
            self._look(targets, found.get, found.sizes, found.read)
        elif run:
            known = b"".join(leaf.encoded for leaf in run if isinstance(leaf, _Known))
            self.source.add(1, f"if b[i:i + {len(known)}] != {known!r}:")
            self.source.add(1, "    raise OtherOutlineError", f"i += {len(known)}")

    def _flush_differing(self) -> None:
        leaves, self._differ = self._differ, []
        for is_clock_, group in itertools.groupby(leaves, lambda leaf: leaf.shape == "clock"):
            if is_clock_:
                self._clocks([leaf.target for leaf in group])
            else:
                self.source.add(1, *leaf_lines(list(group), self.source))

    def _clocks(self, targets: list[str]) -> None:
        """Neighbouring times of six bytes each go through one call."""
        unpack = f"CLOCKS_{len(targets)}"
        self.source.scope[unpack] = struct.Struct("<" + len(targets) * "HI").unpack_from
        halves = [(self.source.name(), self.source.name()) for _ in targets]
        names = ", ".join(name for pair in halves for name in pair)
        self.source.add(1, f"{names} = {unpack}(b, i)", f"i += {6 * len(targets)}")
        for target, (first, last) in zip(targets, halves, strict=True):
            self.source.add(1, f"{target} = n = FIRST[{first}] + LAST[{last}]")
            self.source.add(1, "if n < 0:", "    raise OtherOutlineError")

    def finish(self) -> None:
        self._flush()
        self.source.add(1, *self._last, "return event, i")
