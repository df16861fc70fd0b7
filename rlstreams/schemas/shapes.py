"""Avro shape of each field of an event, from its annotations; builder of generated functions."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from rlstreams.schemas.tensor import Buffer

_FIELDS: dict[type, list[tuple[str, Any]]] = {}
_SCALARS = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}


def fields_of(cls: type) -> list[tuple[str, Any]]:
    """Names and resolved types of a dataclass's fields, in order."""
    if cls not in _FIELDS:
        hints = typing.get_type_hints(cls)
        _FIELDS[cls] = [(f.name, hints[f.name]) for f in dataclasses.fields(cls)]
    return _FIELDS[cls]


def shape_of(kind: Any) -> tuple[str, Any]:  # noqa: ANN401  (annotations have no common type)
    """The Avro shape of a field's Python type, and the type inside it.

    Raises:
        TypeError: a type that no event may use.
    """
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


def from_plain(kind: Any, plain: Any) -> Any:  # noqa: ANN401
    """Return the event's dataclasses, made of dicts and lists as fastavro reads them."""
    shape, inner = shape_of(kind)
    if shape == "record":
        return inner(**{name: from_plain(k, plain[name]) for name, k in fields_of(inner)})
    if shape == "optional":
        return None if plain is None else from_plain(inner, plain)
    if shape == "array":
        return tuple(from_plain(inner, item) for item in plain)
    if shape == "map":
        return {key: from_plain(inner, item) for key, item in plain.items()}
    return plain


class GeneratedSource:
    """Lines of a generated function, its fresh names, and the globals that its lines refer to."""

    def __init__(self, **scope: object) -> None:
        self.scope: dict[str, Any] = dict(scope)
        self._lines: list[str] = []
        self._names = 0

    def add(self, depth: int, *lines: str) -> None:
        """Append lines at an indentation depth."""
        self._lines += ["    " * depth + line for line in lines]

    def name(self) -> str:
        """Return a name that no other variable has."""
        self._names += 1
        return f"v{self._names}"

    def function(self, name: str, title: str) -> Any:  # noqa: ANN401
        """Compile the lines; a traceback shows `title` as the file."""
        exec(compile("\n".join(self._lines), f"<{title}>", "exec"), self.scope)
        return self.scope[name]
