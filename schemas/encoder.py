"""Turn an event's dataclass into a function event -> Avro bytes.

Python source is generated once per class, so a field costs an attribute and a table look-up
instead of a walk over the schema. Only what our events use is supported; anything else fails when
the class is compiled, not when a record is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from schemas.shapes import fields_of, shape_of
from schemas.source import Source
from schemas.tensor import Buffer
from schemas.varint import long_bytes, time_bytes

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower
_TABLE_CHARACTERS = 80  # longer texts do not repeat
_TABLE_AXES = 4  # nor do longer arrays


class _Longs(dict[int, bytes]):
    """Encoded integers; those that may come again are remembered."""

    def __missing__(self, n: int) -> bytes:
        encoded = long_bytes(n)
        if len(encoded) <= 3:  # counts and lengths; times and hashes do not repeat
            if len(self) >= _TABLE_ENTRIES:
                self.clear()
            self[n] = encoded
        return encoded


class _Texts(dict[str, bytes]):
    """Encoded texts; most texts of an event are the same in thousands of events."""

    def __missing__(self, text: str) -> bytes:
        if not isinstance(text, str):
            raise TypeError(f"expected text, got {text!r}")
        utf8 = text.encode()
        encoded = long_bytes(len(utf8)) + utf8
        if len(text) <= _TABLE_CHARACTERS:
            if len(self) >= _TABLE_ENTRIES:
                self.clear()
            self[text] = encoded
        return encoded


class _Arrays(dict[tuple[int, ...], bytes]):
    """Encoded arrays of integers: shapes."""

    def __missing__(self, items: tuple[int, ...]) -> bytes:
        block = long_bytes(len(items)) + b"".join(map(long_bytes, items)) if items else b""
        encoded = block + b"\x00"
        if len(items) <= _TABLE_AXES:
            if len(self) >= _TABLE_ENTRIES:
                self.clear()
            self[items] = encoded
        return encoded


_TABLES = {"LONG": _Longs(), "TEXT": _Texts(), "LONGS": _Arrays(), "time_bytes": time_bytes}


def compile_encoder(cls: type, header: bytes) -> Callable[[Any], list[Buffer]]:
    """A function event -> buffers, the first of them `header`; tensor data is not copied."""
    writer = _Writer(HEADER=header, **_TABLES)
    writer.source.add(0, "def encode(event):", "    out = [HEADER]")
    writer.record(cls, "event", 1)
    writer.flush(1)
    writer.source.add(1, "return out")
    function: Callable[[Any], list[Buffer]] = writer.source.function(
        "encode", f"Avro encoder of {cls.__name__}"
    )
    return function


class _Writer:
    """Emits code by field. Pieces wait in `_pending` until control flow needs them written."""

    def __init__(self, **scope: object) -> None:
        self.source = Source(**scope)
        self._pending: list[str] = []
        self._doubles: list[str] = []

    def record(self, cls: type, value: str, depth: int) -> None:
        for name, kind in fields_of(cls):
            self.field(kind, f"{value}.{name}", depth)

    def field(self, kind: Any, value: str, depth: int) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "double":
            self._doubles.append(value)
            return
        self._merge_doubles()
        if shape == "long":
            is_time = value.endswith("_ms")
            self._pending.append(f"time_bytes({value})" if is_time else f"LONG[{value}]")
        elif shape == "array" and inner is int:
            self._pending.append(f"LONGS[{value}]")
        elif shape == "string":
            self._pending.append(f"TEXT[{value}]")
        elif shape == "boolean":
            self._pending.append(f"(b'\\x01' if {value} else b'\\x00')")
        elif shape == "bytes":
            t = self._local(value, depth)
            self._pending += [f"LONG[len({t})]", t]
        elif shape == "record":
            self.record(inner, self._local(value, depth), depth)
        elif shape == "optional":
            self._optional(inner, self._local(value, depth), depth)
        else:
            self._block(shape, inner, self._local(value, depth), depth)

    def flush(self, depth: int) -> None:
        """Write what is pending."""
        self._merge_doubles()
        if self._pending:
            self.source.add(depth, f"out += ({', '.join(self._pending)},)")
            self._pending.clear()

    def _optional(self, inner: Any, value: str, depth: int) -> None:  # noqa: ANN401
        self.flush(depth)
        self.source.add(depth, f"if {value} is None:", "    out.append(b'\\x00')", "else:")
        self._pending.append("b'\\x02'")
        self.field(inner, value, depth + 1)
        self.flush(depth + 1)

    def _block(self, shape: str, inner: Any, value: str, depth: int) -> None:  # noqa: ANN401
        """An array or a map: one block with all items, then the empty block."""
        self.flush(depth)
        item, key = self.source.name(), self.source.name()
        each = f"{item} in {value}" if shape == "array" else f"{key}, {item} in {value}.items()"
        self.source.add(depth, f"if {value}:", f"    out.append(LONG[len({value})])")
        self.source.add(depth + 1, f"for {each}:")
        if shape == "map":
            self.field(str, key, depth + 2)
        self.field(inner, item, depth + 2)
        self.flush(depth + 2)
        self._pending.append("b'\\x00'")

    def _merge_doubles(self) -> None:
        """Neighbouring doubles go through one call."""
        if self._doubles:
            pack = f"DOUBLES_{len(self._doubles)}"
            self.source.scope[pack] = struct.Struct(f"<{len(self._doubles)}d").pack
            self._pending.append(f"{pack}({', '.join(self._doubles)})")
            self._doubles.clear()

    def _local(self, value: str, depth: int) -> str:
        if "." not in value:
            return value
        name = self.source.name()
        self.source.add(depth, f"{name} = {value}")
        return name
