"""Turn an event's dataclass into Avro encode and decode functions.

Python source is generated once per class and compiled: per field it costs one or two lookups
instead of a walk over the schema. Only what our events use is supported; anything else fails
when the class is compiled, not when a record is written.
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

from schemas.tensor import Buffer

_DOUBLE = struct.Struct("<d")
_SMALL = 8192


def _varint(n: int) -> bytes:
    """Zigzag variable-length integer (Avro `long`)."""
    if not -(1 << 63) <= n < 1 << 63:
        raise ValueError(f"{n} does not fit into 64 bits")
    z = (n << 1) ^ (n >> 63)
    out = bytearray()
    while z > 0x7F:
        out.append((z & 0x7F) | 0x80)
        z >>= 7
    out.append(z)
    return bytes(out)


_SMALL_VARINTS = [_varint(n) for n in range(_SMALL)]


def long_bytes(n: int) -> bytes:
    """An Avro `long`."""
    return _SMALL_VARINTS[n] if 0 <= n < _SMALL else _varint(n)


def read_long(buf: memoryview, i: int) -> tuple[int, int]:
    """An Avro `long` at `i`: its value and where it ends."""
    byte = buf[i]
    i += 1
    z = byte & 0x7F
    shift = 7
    while byte & 0x80:
        if shift > 63:
            raise ValueError(f"integer at byte {i} is longer than 64 bits")
        byte = buf[i]
        i += 1
        z |= (byte & 0x7F) << shift
        shift += 7
    return (z >> 1) ^ -(z & 1), i


def read_length(buf: memoryview, i: int) -> tuple[int, int]:
    """A length at `i`, checked against what is left."""
    n, i = read_long(buf, i)
    if not 0 <= n <= len(buf) - i:
        raise ValueError(f"length {n} at byte {i}, but {len(buf) - i} bytes are left")
    return n, i


def read_count(buf: memoryview, i: int) -> tuple[int, int]:
    """The item count of an array or map block at `i`; a negative one carries a byte size."""
    n, i = read_long(buf, i)
    if n < 0:
        _, i = read_long(buf, i)
        n = -n
    if n > len(buf) - i:
        raise ValueError(f"{n} items at byte {i}, but {len(buf) - i} bytes are left")
    return n, i


class _Source:
    """Lines of a function being generated, with fresh names for its temporaries."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names = 0

    def add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def name(self) -> str:
        self._names += 1
        return f"t{self._names}"


_NAMESPACE: dict[str, Any] = {
    "L": long_bytes,
    "D": _DOUBLE.pack,
    "U": _DOUBLE.unpack_from,
    "read_long": read_long,
    "read_length": read_length,
    "read_count": read_count,
}


def compile_encoder(cls: type[Any], header: bytes) -> Callable[[Any], list[Buffer]]:
    """A function event -> buffers, the first of them `header`."""
    src = _Source()
    src.add(0, "def encode(event):", "    out = [HEADER]", "    w = out.append")
    _encode_record(cls, "event", src, 1)
    src.add(1, "return out")
    scope = {**_NAMESPACE, "HEADER": header}
    exec(compile("\n".join(src.lines), f"<avro encoder of {cls.__name__}>", "exec"), scope)
    return scope["encode"]  # type: ignore[no-any-return]


def _encode_record(cls: type[Any], value: str, src: _Source, depth: int) -> None:
    for name, kind in _fields(cls):
        _encode(kind, f"{value}.{name}", src, depth)


def _encode(kind: Any, value: str, src: _Source, depth: int) -> None:  # noqa: ANN401
    shape, inner = _shape(kind)
    if shape == "long":
        src.add(depth, f"w(L({value}))")
    elif shape == "double":
        src.add(depth, f"w(D({value}))")
    elif shape == "boolean":
        src.add(depth, f"w(b'\\x01' if {value} else b'\\x00')")
    elif shape in ("string", "bytes"):
        t = src.name()
        text = ".encode()" if shape == "string" else ""
        src.add(depth, f"{t} = {value}{text}", f"w(L(len({t})))", f"w({t})")
    elif shape == "record":
        t = src.name()
        src.add(depth, f"{t} = {value}")
        _encode_record(inner, t, src, depth)
    elif shape == "optional":
        t = src.name()
        src.add(depth, f"{t} = {value}", f"if {t} is None:", "    w(b'\\x00')", "else:")
        src.add(depth + 1, "w(b'\\x02')")
        _encode(inner, t, src, depth + 1)
    elif shape == "array":
        t, item = src.name(), src.name()
        src.add(depth, f"{t} = {value}", f"if {t}:")
        src.add(depth + 1, f"w(L(len({t})))", f"for {item} in {t}:")
        _encode(inner, item, src, depth + 2)
        src.add(depth, "w(b'\\x00')")
    else:
        t, key, item = src.name(), src.name(), src.name()
        src.add(depth, f"{t} = {value}", f"if {t}:")
        src.add(depth + 1, f"w(L(len({t})))", f"for {key}, {item} in {t}.items():")
        _encode(str, key, src, depth + 2)
        _encode(inner, item, src, depth + 2)
        src.add(depth, "w(b'\\x00')")


def compile_decoder(cls: type[Any]) -> Callable[[memoryview, int], tuple[Any, int]]:
    """A function (record, start) -> (event, end); `end` may lie past a truncated record."""
    src = _Source()
    scope: dict[str, Any] = dict(_NAMESPACE)
    src.add(0, "def decode(buf, i):")
    result = _decode_record(cls, src, 1, scope)
    src.add(1, f"return {result}, i")
    exec(compile("\n".join(src.lines), f"<avro decoder of {cls.__name__}>", "exec"), scope)
    return scope["decode"]  # type: ignore[no-any-return]


def _decode_record(cls: type[Any], src: _Source, depth: int, scope: dict[str, Any]) -> str:
    values = [(name, _decode(kind, src, depth, scope)) for name, kind in _fields(cls)]
    scope[cls.__name__] = cls
    t = src.name()
    src.add(depth, f"{t} = {cls.__name__}({', '.join(f'{n}={v}' for n, v in values)})")
    return t


def _decode(kind: Any, src: _Source, depth: int, scope: dict[str, Any]) -> str:  # noqa: ANN401
    shape, inner = _shape(kind)
    t = src.name()
    if shape == "long":
        src.add(depth, f"{t} = buf[i]", f"if {t} < 128:")
        src.add(depth + 1, f"{t} = ({t} >> 1) ^ -({t} & 1)", "i += 1")
        src.add(depth, "else:", f"    {t}, i = read_long(buf, i)")
    elif shape == "double":
        src.add(depth, f"{t} = U(buf, i)[0]", "i += 8")
    elif shape == "boolean":
        src.add(depth, f"{t} = buf[i] != 0", "i += 1")
    elif shape in ("string", "bytes"):
        n = src.name()
        src.add(depth, f"{n}, i = read_length(buf, i)")
        view = "str(buf[i:i + {n}], 'utf-8')" if shape == "string" else _bytes_view(inner)
        src.add(depth, f"{t} = {view.format(n=n)}", f"i += {n}")
    elif shape == "record":
        return _decode_record(inner, src, depth, scope)
    elif shape == "optional":
        src.add(depth, f"{t} = None", "i += 1", "if buf[i - 1]:")
        value = _decode(inner, src, depth + 1, scope)
        src.add(depth + 1, f"{t} = {value}")
    elif shape == "array":
        n, items = _decode_block(src, depth, "[]")
        value = _decode(inner, src, depth + 2, scope)
        src.add(depth + 2, f"{items}.append({value})")
        src.add(depth + 1, f"{n}, i = read_count(buf, i)")
        src.add(depth, f"{t} = tuple({items})")
    else:
        n, items = _decode_block(src, depth, "{}")
        key = _decode(str, src, depth + 2, scope)
        value = _decode(inner, src, depth + 2, scope)
        src.add(depth + 2, f"{items}[{key}] = {value}")
        src.add(depth + 1, f"{n}, i = read_count(buf, i)")
        src.add(depth, f"{t} = {items}")
    return t


def _bytes_view(kind: Any) -> str:  # noqa: ANN401
    """`bytes` fields are small and copied; tensor data stays a view."""
    return "bytes(buf[i:i + {n}])" if kind is bytes else "buf[i:i + {n}]"


def _decode_block(src: _Source, depth: int, empty: str) -> tuple[str, str]:
    n, items = src.name(), src.name()
    src.add(depth, f"{items} = {empty}", f"{n}, i = read_count(buf, i)", f"while {n}:")
    src.add(depth + 1, f"for _ in range({n}):")
    return n, items


def from_plain(kind: Any, plain: Any) -> Any:  # noqa: ANN401
    """Dicts and lists, as fastavro reads them, as the event's dataclasses."""
    shape, inner = _shape(kind)
    if shape == "record":
        return inner(**{name: from_plain(k, plain[name]) for name, k in _fields(inner)})
    if shape == "optional":
        return None if plain is None else from_plain(inner, plain)
    if shape == "array":
        return tuple(from_plain(inner, item) for item in plain)
    if shape == "map":
        return {key: from_plain(inner, item) for key, item in plain.items()}
    return plain


@cache
def _fields(cls: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(f.name, hints[f.name]) for f in dataclasses.fields(cls)]


_SCALARS = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}


def _shape(kind: Any) -> tuple[str, Any]:  # noqa: ANN401
    """The Avro shape of a field's Python type, and the type inside it."""
    if kind in _SCALARS:
        return _SCALARS[kind], kind
    if kind == Buffer:
        return "bytes", kind
    if dataclasses.is_dataclass(kind):
        return "record", kind
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return "array", args[0]
    if origin is dict and args[0] is str:
        return "map", args[1]
    if origin in (types.UnionType, typing.Union) and len(args) == 2 and type(None) in args:
        return "optional", next(a for a in args if a is not type(None))
    raise TypeError(f"no Avro shape for {kind!r}")
