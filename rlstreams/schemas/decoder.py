"""Generated functions Avro bytes -> event, or -> a few of its fields with the rest stepped over.

Python source is generated once per class. A record is filled while it belongs to an unfrozen twin
class with the same `__slots__`, whose `__class__` is then set (Python data model, "__slots__":
allowed between classes of equal slots).

Every piece of code moves `i` behind the bytes that it read, never back. A length or a number of
items that the record has no bytes for is refused where it stands. A smaller overrun is found by the
caller, which compares where the fields end with where the record ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlstreams.schemas.shapes import GeneratedSource, fields_of, shape_of
from rlstreams.schemas.varint import read_count, read_length, read_long

# (record, view of the record, start) -> (value, end); `end` may lie past a record that was cut.
Decoder = Callable[[bytes, memoryview, int], tuple[Any, int]]
# Fields by name: the variable that a whole field is read to, or the wanted fields of its records.
Wanted = Mapping[str, "str | Wanted"]

_READ = {
    "long": """\
n = b[i]
if n < 128:
    {to} = SHORT_LONG[n]
    i += 1
else:
    {to}, i = read_long(b, i)""",
    "string": """\
n = SHORT_SIZE[b[i]]
if n:
    j = i + n
    {to} = b[i + 1 : j].decode()
    i = j
else:
    {to}, i = read_text(b, i)""",
    "bytes": """\
n, i = read_length(b, i)
j = i + n
{to} = {source}[i:j]
i = j""",
    "double": """\
({to},) = read_double(b, i)
i += 8""",
    "boolean": """\
{to} = b[i] == 1
if b[i] > 1:
    refuse("boolean", b[i], i)
i += 1""",
    "count": """\
{to} = SHORT_COUNT[b[i]]
if {to} < 0:
    {to}, i = read_count(b, i)
else:
    i += 1""",
}
_PASS = {
    "long": "i = i + 1 if b[i] < 128 else past_long(b, i)",
    "string": """\
n = SHORT_SIZE[b[i]]
if n:
    i += n
else:
    n, i = read_length(b, i)
    i += n""",
    "double": "i += 8",
    "boolean": _READ["boolean"].format(to="n"),
}
_PASS["bytes"] = _PASS["string"]


def compile_decoder(cls: type) -> Decoder:
    """A function that reads a record of an event's present schema."""
    reader = _Reader()
    reader.value(cls, "event", 1)
    return reader.function(cls, "event")


def compile_projection(cls: type, wanted: Wanted, variables: Sequence[str]) -> Decoder:
    """A function that reads the wanted fields to a tuple of their variables.

    Raises:
        ValueError: a field that the event does not have.
    """
    reader = _Reader()
    reader.part(cls, wanted, 1)
    return reader.function(cls, f"({''.join(f'{name}, ' for name in variables)})")


def _read_text(b: bytes, i: int) -> tuple[str, int]:
    size, i = read_length(b, i)
    return b[i : i + size].decode(), i + size


def _past_long(b: bytes, i: int) -> int:
    for end in range(i + 1, i + 9):  # up to nine bytes hold 63 bits
        if b[end] < 128:
            return end + 1
    return read_long(b, i)[1]


def _refuse(what: str, byte: int, i: int) -> None:
    raise ValueError(f"{what} encoded as {byte} at byte {i}")


_SCOPE: dict[str, object] = {
    # By a number's first byte, if that is the whole number: the integer; the bytes of a text and
    # its length prefix, else 0; the number of items, else -1.
    "SHORT_LONG": tuple((z >> 1) ^ -(z & 1) for z in range(128)),
    "SHORT_SIZE": tuple(1 + (z >> 1) if z < 128 and not z & 1 else 0 for z in range(256)),
    "SHORT_COUNT": tuple(z >> 1 if z < 128 and not z & 1 else -1 for z in range(256)),
    "read_long": read_long,
    "read_length": read_length,
    "read_count": read_count,
    "read_text": _read_text,
    "past_long": _past_long,
    "read_double": struct.Struct("<d").unpack_from,
    "refuse": _refuse,
}


class _Reader:
    """Emits code, field by field."""

    def __init__(self) -> None:
        self._source = GeneratedSource(**_SCOPE)
        self._add = self._source.add
        self._name = self._source.name
        self._add(0, "def read(b, view, i):")

    def function(self, cls: type, found: str) -> Decoder:
        self._add(1, f"return {found}, i")
        decoder: Decoder = self._source.function("read", f"Avro decoder of {cls.__name__}")
        return decoder

    def value(self, kind: Any, to: str, depth: int) -> None:  # noqa: ANN401
        """Read a value whole."""
        shape, inner = shape_of(kind)
        if shape == "record":
            self._record(inner, to, depth)
        elif shape == "optional":
            self._optional(lambda depth: self.value(inner, to, depth), [to], depth)
        elif shape in ("array", "map"):
            self._items(shape, inner, to, depth)
        else:
            source = "b" if inner is bytes else "view"
            self._add(depth, *_READ[shape].format(to=to, source=source).splitlines())

    def part(self, cls: type, wanted: Wanted, depth: int) -> None:
        """Read the wanted fields of a record, step over the others."""
        if unknown := wanted.keys() - {name for name, _ in fields_of(cls)}:
            raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        for name, kind in fields_of(cls):
            within = wanted.get(name)
            if within is None:
                self._past(kind, depth)
            elif isinstance(within, str):
                self.value(kind, within, depth)
            else:
                self._within(f"{cls.__name__}.{name}", kind, within, depth)

    def _within(self, path: str, kind: Any, wanted: Wanted, depth: int) -> None:  # noqa: ANN401
        """Read the wanted fields of a nested record, or of each record of an array."""
        shape, inner = shape_of(kind)
        if shape == "record":
            self.part(inner, wanted, depth)
        elif shape == "optional":
            variables = list(_variables(wanted))
            self._optional(lambda depth: self._within(path, inner, wanted, depth), variables, depth)
        elif shape == "array":
            variables = list(_variables(wanted))

            def item(depth: int) -> None:
                self._within(path, inner, _of_item(wanted), depth)
                self._add(depth, *(f"{name}.append({name}_)" for name in variables))

            self._add(depth, *(f"{name} = []" for name in variables))
            self._blocks(item, depth)
        else:
            raise ValueError(f"{path} is a {shape}: it has no field {', '.join(wanted)}")

    def _past(self, kind: Any, depth: int) -> None:  # noqa: ANN401
        """Step over a value."""
        shape, inner = shape_of(kind)
        if shape == "record":
            for _, field in fields_of(inner):
                self._past(field, depth)
        elif shape == "optional":
            self._optional(lambda depth: self._past(inner, depth), [], depth)
        elif shape == "array":
            self._blocks(lambda depth: self._past(inner, depth), depth)
        elif shape == "map":

            def entry(depth: int) -> None:
                self._past(str, depth)
                self._past(inner, depth)

            self._blocks(entry, depth)
        else:
            self._add(depth, *_PASS[shape].splitlines())

    def _record(self, cls: Any, to: str, depth: int) -> None:  # noqa: ANN401
        if hasattr(cls, "__post_init__"):
            raise TypeError(f"{cls.__name__} checks itself at birth; decoding would step around it")
        new, record = f"New{cls.__name__}", self._name()
        self._source.scope[cls.__name__] = cls
        self._source.scope[new] = type(new, (), {"__slots__": cls.__slots__})
        self._add(depth, f"{record} = {new}()")
        for name, kind in fields_of(cls):
            self.value(kind, f"{record}.{name}", depth)
        self._add(depth, f"{record}.__class__ = {cls.__name__}", f"{to} = {record}")

    def _items(self, shape: str, inner: Any, to: str, depth: int) -> None:  # noqa: ANN401
        items, item, key = self._name(), self._name(), self._name()

        def read_item(depth: int) -> None:
            if shape == "map":
                self.value(str, key, depth)
            self.value(inner, item, depth)
            keep = f"{items}.append({item})" if shape == "array" else f"{items}[{key}] = {item}"
            self._add(depth, keep)

        self._add(depth, f"{items} = {'[]' if shape == 'array' else '{}'}")
        self._blocks(read_item, depth)
        self._add(depth, f"{to} = {f'tuple({items})' if shape == 'array' else items}")

    def _blocks(self, item: Callable[[int], None], depth: int) -> None:
        """Items come in blocks until an empty one."""
        left = self._name()
        count = _READ["count"].format(to=left).splitlines()
        self._add(depth, *count, f"while {left}:", f"    for _ in range({left}):")
        item(depth + 2)
        self._add(depth + 1, *count)

    def _optional(self, value: Callable[[int], None], variables: Sequence[str], depth: int) -> None:
        """A union of null and a value; without one the variables are None."""
        self._add(depth, "if b[i] == 2:", "    i += 1")
        value(depth + 1)
        self._add(depth, "else:", "    if b[i]:", "        refuse('union branch', b[i], i)")
        self._add(depth + 1, "i += 1", *(f"{name} = None" for name in variables))


def _variables(wanted: Wanted) -> Iterator[str]:
    for within in wanted.values():
        if isinstance(within, str):
            yield within
        else:
            yield from _variables(within)


def _of_item(wanted: Wanted) -> Wanted:
    """Return `wanted` with the names of the variables that one item of an array is read to."""
    return {
        name: f"{within}_" if isinstance(within, str) else _of_item(within)
        for name, within in wanted.items()
    }
