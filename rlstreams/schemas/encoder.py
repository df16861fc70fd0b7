"""Generated functions event -> Avro bytes, one for each class.

Only what our events use is supported; anything else fails when the class is compiled, not when a
record is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlstreams.schemas.shapes import GeneratedSource, fields_of, shape_of
from rlstreams.schemas.tensor import Buffer
from rlstreams.schemas.text import whole_text
from rlstreams.schemas.varint import long_bytes


def _text_bytes(text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r}")
    utf8 = whole_text(text).encode()
    return _LONG(len(utf8)) + utf8


_LONG = lru_cache(maxsize=8192, typed=True)(long_bytes)  # small integers repeat, and so do names
_SCOPE = {
    "LONG": _LONG,
    "TEXT": lru_cache(maxsize=2048)(_text_bytes),
    "double": struct.Struct("<d").pack,
}
_PIECES = {
    "long": "LONG({0})",
    "string": "TEXT({0})",
    "double": "double({0})",
    "boolean": "b'\\x01' if {0} else b'\\x00'",
    "bytes": "LONG(len({0})), {0}",
}


def compile_encoder(cls: type, header: bytes) -> Callable[[Any], list[Buffer]]:
    """A function event -> buffers, the first of them `header`; tensor data is not copied."""
    writer = _Writer(HEADER=header, **_SCOPE)
    writer.source.add(0, "def encode(event):", "    out = [HEADER]")
    writer.value(cls, "event", 1)
    writer.flush(1)
    writer.source.add(1, "return out")
    function: Callable[[Any], list[Buffer]] = writer.source.function(
        "encode", f"Avro encoder of {cls.__name__}"
    )
    return function


class _Writer:
    """Emits code, field by field. Pieces wait until control flow needs them written."""

    def __init__(self, **scope: object) -> None:
        self.source = GeneratedSource(**scope)
        self._pending: list[str] = []

    def value(self, kind: Any, value: str, depth: int) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape in ("long", "string", "double", "boolean"):
            self._pending.append(_PIECES[shape].format(value))
            return
        local = self.source.name()
        self.source.add(depth, f"{local} = {value}")
        if shape == "bytes":
            self._pending.append(_PIECES[shape].format(local))
        elif shape == "record":
            for name, field in fields_of(inner):
                self.value(field, f"{local}.{name}", depth)
        elif shape == "optional":
            self._optional(inner, local, depth)
        else:
            self._items(shape, inner, local, depth)

    def flush(self, depth: int) -> None:
        """Write what is pending."""
        if self._pending:
            self.source.add(depth, f"out += ({', '.join(self._pending)},)")
            self._pending.clear()

    def _optional(self, inner: Any, value: str, depth: int) -> None:  # noqa: ANN401
        self.flush(depth)
        self.source.add(depth, f"if {value} is None:", "    out.append(b'\\x00')", "else:")
        self._pending.append("b'\\x02'")
        self.value(inner, value, depth + 1)
        self.flush(depth + 1)

    def _items(self, shape: str, inner: Any, value: str, depth: int) -> None:  # noqa: ANN401
        """An array or a map: one block with all items, then the empty block."""
        self.flush(depth)
        item, key = self.source.name(), self.source.name()
        each = f"{item} in {value}" if shape == "array" else f"{key}, {item} in {value}.items()"
        self.source.add(depth, f"if {value}:", f"    out.append(LONG(len({value})))")
        self.source.add(depth + 1, f"for {each}:")
        if shape == "map":
            self.value(str, key, depth + 2)
        self.value(inner, item, depth + 2)
        self.flush(depth + 2)
        self._pending.append("b'\\x00'")
