"""Turn an event's dataclass into a function Avro bytes -> event: any record, field by field.

Python source is generated once per class. Objects are filled while they belong to an unfrozen
twin class with the same `__slots__`, whose `__class__` is then set (Python data model,
"__slots__": allowed between classes of equal slots). What a stream repeats is decoded sooner by
`schemas.straight` and `schemas.alike`; what a record says, and whether it is damaged, is decided
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, cast

from rlstreams.schemas.alike import Alike, Decoder, is_plain
from rlstreams.schemas.leaves import SCOPE, Leaf, leaf_lines
from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.schemas.source import Source


def compile_decoder(cls: type) -> Decoder:
    """A function (record, view of it, start) -> (event, end); `end` may lie past a cut record."""
    reader = _Reader()
    reader.source.add(0, "def decode(b, view, i):")
    reader.record(cls, "event", 1)
    reader.flush(1)
    reader.source.add(1, "return event, i")
    decoder: Decoder = reader.source.function("decode", f"Avro decoder of {cls.__name__}")
    return decoder


class _Reader:
    """Emits code by field; every piece of it moves `i` behind what it read.

    Leaves wait in `_pending`, with the lines between them, until control flow needs them read.
    """

    def __init__(self) -> None:
        self.source = Source(**SCOPE)
        self._pending: list[Leaf | str] = []

    def record(self, cls: type, target: str, depth: int) -> None:
        new, name = self.source.twin(cls), cls.__name__
        local = target if "." not in target else self.source.name()
        self.source.add(depth, f"{local} = {new}()")
        for field, kind in fields_of(cls):
            self.field(kind, f"{local}.{field}", depth)
        self._pending.append(f"{local}.__class__ = {name}")
        if local != target:
            self._pending.append(f"{target} = {local}")

    def field(self, kind: Any, target: str, depth: int) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "record":
            self.record(inner, target, depth)
        elif shape == "optional":
            self._optional(inner, target, depth)
        elif shape == "array" and inner is int:
            count = self.source.name()
            self._pending.append(Leaf(count, "count"))
            self._pending.append(f"{target}, i = read_longs(b, i, {count})")
        elif shape == "array" and shape_of(inner)[0] == "record" and is_plain(inner):
            self._alike(inner, target, depth)
        elif shape in ("array", "map"):
            self._block(shape, inner, target, depth)
        else:
            self._pending.append(Leaf(target, shape, inner))

    def flush(self, depth: int) -> None:
        """Emit what is pending."""
        pending, self._pending = self._pending, []
        for is_line, group in itertools.groupby(pending, lambda item: isinstance(item, str)):
            if is_line:
                self.source.add(depth, *cast("Iterable[str]", group))
            else:
                self.source.add(
                    depth, *leaf_lines(list(cast("Iterable[Leaf]", group)), self.source)
                )

    def _optional(self, inner: Any, target: str, depth: int) -> None:  # noqa: ANN401
        branch = self.source.name()
        self._pending.append(Leaf(branch, "branch"))
        self.flush(depth)
        self.source.add(depth, f"if {branch} == 0:", f"    {target} = None")
        self.source.add(depth, f"elif {branch} == 2:")
        self.field(inner, target, depth + 1)
        self.flush(depth + 1)
        self.source.add(depth, "else:", f"    refuse('union branch', {branch}, i - 1)")

    def _alike(self, inner: type, target: str, depth: int) -> None:
        """An array of records without branches."""
        items, left, read = (self.source.name() for _ in range(3))
        self.source.scope[read] = Alike(inner, compile_decoder(inner)).read
        self._pending.append(Leaf(left, "count"))
        self.flush(depth)
        self.source.add(depth, f"{items} = []", f"while {left}:")
        self.source.add(depth + 1, f"i = {read}(b, i, {left}, {items})")
        self._pending.append(Leaf(left, "count"))
        self.flush(depth + 1)
        self.source.add(depth, f"{target} = tuple({items})")

    def _block(self, shape: str, inner: Any, target: str, depth: int) -> None:  # noqa: ANN401
        """An array or a map: blocks of items until an empty one."""
        items, left, item, key = (self.source.name() for _ in range(4))
        self._pending.append(Leaf(left, "count"))
        self.flush(depth)
        self.source.add(depth, f"{items} = {'[]' if shape == 'array' else '{}'}")
        self.source.add(depth, f"while {left}:", f"    for _ in range({left}):")
        if shape == "map":
            self.field(str, key, depth + 2)
        self.field(inner, item, depth + 2)
        self.flush(depth + 2)
        keep_it = f"{items}.append({item})" if shape == "array" else f"{items}[{key}] = {item}"
        self.source.add(depth + 2, keep_it)
        self._pending.append(Leaf(left, "count"))
        self.flush(depth + 1)
        self.source.add(depth, f"{target} = {f'tuple({items})' if shape == 'array' else items}")
