"""Turn an event's dataclass into a function event -> Avro bytes.

Python source is generated once per class. Neighbouring texts and integers that repeat from record
to record (`STEADY`, lengths, what stands before a tensor's data) are encoded by one look-up of all
their values; a field of its own costs an attribute and a look-up. Doubles are in no key, for 0.0
equals -0.0. Only what our events use is supported; anything else fails when the class is compiled,
not when a record is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlstreams.schemas.runs import STEADY
from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.schemas.source import Source
from rlstreams.schemas.tensor import Buffer, Tensor
from rlstreams.schemas.varint import FIRST_TWO, UPPER_BYTES, long_bytes, time_bytes

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower
_TABLE_CHARACTERS = 80  # longer texts do not repeat
_TABLE_AXES = 4  # nor do longer arrays
_RUN_BYTES = 512  # nor longer neighbours


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


class Table(Protocol):
    """Encodes the values of a field."""

    def __getitem__(self, value: Any, /) -> bytes:  # noqa: ANN401
        """`value` in Avro."""
        ...


class Runs(dict[tuple[Any, ...], bytes]):
    """Encoded neighbours, by their values."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.tables = tables

    def encoded(self, values: tuple[Any, ...]) -> bytes:
        """One after the other."""
        return b"".join(table[v] for table, v in zip(self.tables, values, strict=True))

    def repeats(self, values: tuple[Any, ...]) -> bool:
        """Whether `values` may be remembered."""
        return True

    def __missing__(self, values: tuple[Any, ...]) -> bytes:
        encoded = self.encoded(values)
        if len(encoded) <= _RUN_BYTES and self.repeats(values):
            if len(self) >= _TABLE_ENTRIES:
                self.clear()
            self[values] = encoded
        return encoded


_LONG, _TEXT, _LONGS = _Longs(), _Texts(), _Arrays()
TABLES = {"LONG": _LONG, "TEXT": _TEXT, "LONGS": _LONGS}
CLOCK = {"TWO": FIRST_TWO, "MORE": UPPER_BYTES, "time_bytes": time_bytes}
HEADS = Runs((_TEXT, _LONGS, _TEXT, _LONG))  # dtype, shape, codec, length


def compile_encoder(cls: type, header: bytes) -> Callable[[Any], list[Buffer]]:
    """A function event -> buffers, the first of them `header`; tensor data is not copied."""
    writer = _Writer(HEADER=header, **TABLES, HEADS=HEADS, **CLOCK)
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
        self._run: list[tuple[str, str]] = []  # table and value

    def record(self, cls: type, value: str, depth: int) -> None:
        if cls is Tensor:
            data = self.source.name()
            self.source.add(depth, f"{data} = {value}.data")
            self._piece(f"HEADS[{value}.dtype, {value}.shape, {value}.codec, len({data})]", data)
            return
        for name, kind in fields_of(cls):
            self.field(kind, f"{value}.{name}", depth, steady=name in STEADY)

    def field(self, kind: Any, value: str, depth: int, *, steady: bool = False) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "double":
            self._end_run()
            self._doubles.append(value)
        elif shape == "long" and value.endswith("_ms"):
            self._time(value, depth)
        elif shape in ("long", "string"):
            table = "LONG" if shape == "long" else "TEXT"
            if steady:
                self._steady(table, value)
            else:
                self._piece(f"{table}[{value}]")
        elif shape == "array" and inner is int:
            self._piece(f"LONGS[{value}]")
        elif shape == "boolean":
            self._piece(f"(b'\\x01' if {value} else b'\\x00')")
        elif shape == "bytes":
            data = self._local(value, depth)
            self._piece(f"LONG[len({data})]", data)
        elif shape == "record":
            self.record(inner, self._local(value, depth), depth)
        elif shape == "optional":
            self._optional(inner, self._local(value, depth), depth)
        else:
            self._block(shape, inner, self._local(value, depth), depth)

    def flush(self, depth: int) -> None:
        """Write what is pending."""
        self._end_neighbours()
        if self._pending:
            self.source.add(depth, f"out += ({', '.join(self._pending)},)")
            self._pending.clear()

    def _optional(self, inner: Any, value: str, depth: int) -> None:  # noqa: ANN401
        self._end_neighbours()
        before = list(self._pending)  # goes out with what either branch writes
        self.source.add(depth, f"if {value} is None:")
        self._piece("b'\\x00'")
        self.flush(depth + 1)
        self.source.add(depth, "else:")
        self._pending = [*before, "b'\\x02'"]
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
        self._piece("b'\\x00'")

    def _piece(self, *pieces: str) -> None:
        self._end_neighbours()
        self._pending += pieces

    def _steady(self, table: str, value: str) -> None:
        self._end_doubles()
        self._run.append((table, value))

    def _end_neighbours(self) -> None:
        self._end_doubles()
        self._end_run()

    def _end_run(self) -> None:
        """Neighbouring steady fields are encoded together."""
        run, self._run = self._run, []
        if len(run) > 1:
            table = self.source.name()
            self.source.scope[table] = Runs([self.source.scope[name] for name, _ in run])
            self._pending.append(f"{table}[{', '.join(value for _, value in run)}]")
        else:
            self._pending += [f"{table}[{value}]" for table, value in run]

    def _end_doubles(self) -> None:
        """Neighbouring doubles go through one call."""
        if self._doubles:
            pack = f"DOUBLES_{len(self._doubles)}"
            self.source.scope[pack] = struct.Struct(f"<{len(self._doubles)}d").pack
            self._pending.append(f"{pack}({', '.join(self._doubles)})")
            self._doubles.clear()

    def _time(self, value: str, depth: int) -> None:
        """A wall clock: its upper part is the same for 8 seconds, its lower one of few."""
        time, upper = self._local(value, depth), self.source.name()
        self.source.add(depth, f"{upper} = MORE.get({time} >> 13)")
        known = f"TWO[{time} << 1 & 16383]"
        self._piece(f"(time_bytes({time}) if {upper} is None else {known})", f"{upper} or b''")

    def _local(self, value: str, depth: int) -> str:
        if "." not in value:
            return value
        name = self.source.name()
        self.source.add(depth, f"{name} = {value}")
        return name
