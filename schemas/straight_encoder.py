"""Encoders without branches and loops, for events that are outlined alike.

What `schemas.straight` is to decoding: for each outline that comes often a straight line of code,
in which neighbours that repeat from event to event (`STEADY`, and all that the outline tells) are
encoded by one look-up of their values, whatever borders of segments and tensors lie between. An
event of another outline, and one with a field of a wrong type, is left to the encoder of all
events, which alone judges.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from rlstreams.schemas.encoder import CLOCK, HEADS, TABLES, Runs, Table
from rlstreams.schemas.runs import STEADY, OtherOutlineError
from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.schemas.source import Source
from rlstreams.schemas.straight import Outline
from rlstreams.schemas.tensor import Buffer, Tensor
from rlstreams.schemas.varint import long_bytes

StraightEncoder = Callable[[Any], list[Buffer]]
_TABLE_OF = {"long": "LONG", "string": "TEXT", "double": "DOUBLE"}


def compile_straight_encoder(cls: type, outline: Outline, header: bytes) -> StraightEncoder:
    """A function event -> buffers, the first of which begins with `header`; see `compile_encoder`.

    It raises OtherOutlineError, or what a None or a wrong type leads to, of any other event.
    """
    line = _Line(outline, header)
    line.source.add(0, "def encode(event):")
    line.record(cls, "event")
    line.finish()
    function: StraightEncoder = line.source.function(
        "encode", f"Avro encoder of {cls.__name__} {outline}"
    )
    return function


class _Doubles:
    """Encodes what stands in no table by itself."""

    def __getitem__(self, value: float) -> bytes:
        return struct.pack("<d", value)


class _SteadyRuns(Runs):
    """Encoded neighbours, with bytes that the outline tells in between.

    Of a run with a double that is 0 nothing is remembered: 0.0 equals -0.0, and their bytes differ.
    """

    def __init__(self, parts: Sequence[Table | bytes]) -> None:
        super().__init__([part for part in parts if not isinstance(part, bytes)])
        self._parts = parts

    def encoded(self, values: tuple[Any, ...]) -> bytes:
        rest = iter(values)
        return b"".join(
            part if isinstance(part, bytes) else part[next(rest)] for part in self._parts
        )

    def repeats(self, values: tuple[Any, ...]) -> bool:
        pairs = zip(self.tables, values, strict=True)
        return not any(value == 0 for table, value in pairs if table is _DOUBLE)


_DOUBLE = _Doubles()


class _Line:
    """Collects the pieces of the list that is returned, in order."""

    def __init__(self, outline: Outline, header: bytes) -> None:
        self.source = Source(
            **TABLES, **CLOCK, HEADS=HEADS, DOUBLE=_DOUBLE, OtherOutlineError=OtherOutlineError
        )
        self._outline = iter(outline)
        self._run: list[bytes | tuple[str, str]] = [header]  # or table and value
        self._pieces: list[str] = []

    def record(self, cls: type, value: str) -> None:
        if cls is Tensor:
            local, data = self._local(value), self.source.name()
            self.source.add(1, f"{data} = {local}.data")
            head = f"HEADS[{local}.dtype, {local}.shape, {local}.codec, len({data})]"
            self._piece(head, data)
            return
        local = self._local(value)
        for name, kind in fields_of(cls):
            self._field(name, kind, f"{local}.{name}")

    def finish(self) -> None:
        self._end_run()
        self.source.add(1, f"return [{', '.join(self._pieces)}]")

    def _field(self, name: str, kind: Any, value: str) -> None:  # noqa: ANN401
        shape, inner = shape_of(kind)
        if shape == "record":
            self.record(inner, value)
        elif shape == "optional":
            self._optional(name, inner, value)
        elif shape in ("array", "map"):
            self._items(shape, inner, value)
        elif shape == "long" and name.endswith("_ms"):
            next(self._outline)
            self._time(value)
        elif shape == "boolean":
            self._piece(f"(b'\\x01' if {value} else b'\\x00')")
        elif shape == "bytes":
            data = self._local(value)
            self._piece(f"LONG[len({data})]", data)
        elif name in STEADY:
            self._run.append((_TABLE_OF[shape], value))
        elif shape == "double":
            self.source.scope["PACK"] = struct.Struct("<d").pack
            self._piece(f"PACK({value})")
        else:
            self._piece(f"{_TABLE_OF[shape]}[{value}]")

    def _optional(self, name: str, inner: Any, value: str) -> None:  # noqa: ANN401
        """A None where a record belongs has not its fields, which is told anyway."""
        if next(self._outline):
            if shape_of(inner)[0] != "record":
                self._refuse_if(f"{value} is None")
            self._run.append(b"\x02")
            self._field(name, inner, value)
        else:
            self._refuse_if(f"{value} is not None")
            self._run.append(b"\x00")

    def _items(self, shape: str, inner: Any, value: str) -> None:  # noqa: ANN401
        """An array or a map of as many items as the outline says."""
        count = next(self._outline)
        if not count:
            self._refuse_if(value)
        else:
            self._run.append(long_bytes(count))
            items = [self.source.name() for _ in range(count)]
            keys = [self.source.name() for _ in range(count)]
            pairs = [f"({k}, {i})" for k, i in zip(keys, items, strict=True)]
            names, those = (items, value) if shape == "array" else (pairs, f"{value}.items()")
            self.source.add(1, f"{', '.join(names)}, = {those}")
            for key, item in zip(keys, items, strict=True):
                if shape == "map":
                    self._run.append(("TEXT", key))
                self._field("", inner, item)
        self._run.append(b"\x00")

    def _time(self, value: str) -> None:
        """As the encoder of all events has it: `TWO` and `MORE` know the times of these seconds."""
        time, upper = self._local(value), self.source.name()
        self.source.add(1, f"{upper} = MORE.get({time} >> 13)")
        known = f"TWO[{time} << 1 & 16383]"
        self._piece(f"(time_bytes({time}) if {upper} is None else {known})", f"{upper} or b''")

    def _refuse_if(self, condition: str) -> None:
        self.source.add(1, f"if {condition}:", "    raise OtherOutlineError")

    def _piece(self, *pieces: str) -> None:
        self._end_run()
        self._pieces += pieces

    def _end_run(self) -> None:
        run, self._run = self._run, []
        values = [part[1] for part in run if not isinstance(part, bytes)]
        if values:
            scope, table = self.source.scope, f"RUN_{len(self._pieces)}"
            scope[table] = _SteadyRuns([p if isinstance(p, bytes) else scope[p[0]] for p in run])
            self._pieces.append(f"{table}[{', '.join(values)},]")
        elif run:
            self._pieces.append(repr(b"".join(part for part in run if isinstance(part, bytes))))

    def _local(self, value: str) -> str:
        if "." not in value:
            return value
        name = self.source.name()
        self.source.add(1, f"{name} = {value}")
        return name
