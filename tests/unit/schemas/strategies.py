"""Any event at all and any of its fields, for property tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from hypothesis import strategies as st

from rlstreams.schemas import EVENTS
from rlstreams.schemas.shapes import fields_of, shape_of

_SCALARS = {
    "string": st.text(max_size=90),
    "long": st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 200),
    "double": st.floats(allow_nan=False),
    "boolean": st.booleans(),
    "bytes": st.binary(max_size=40),
}


@cache
def _record(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{name: values(kind) for name, kind in fields_of(cls)})


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field annotated with `kind` may hold."""
    shape, inner = shape_of(kind)
    if shape == "record":
        return _record(inner)
    if shape == "optional":
        return st.none() | values(inner)
    if shape == "array":
        return st.lists(values(inner), max_size=3).map(tuple)
    if shape == "map":
        return st.dictionaries(st.text(max_size=9), values(inner), max_size=3)
    return _SCALARS[shape]


def events() -> st.SearchStrategy[Any]:
    """An event of any kind."""
    return st.sampled_from(EVENTS).flatmap(_record)


def paths_of(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field with its shape, those of records within records and arrays too."""
    for name, kind in fields_of(cls):
        shape, inner = shape_of(kind)
        yield prefix + name, shape
        if shape in ("optional", "array"):
            shape, inner = shape_of(inner)
        if shape == "record":
            yield from paths_of(inner, f"{prefix}{name}.")


def picked(node: Any, path: str) -> Any:
    """The value at a path of an event, as a projection gives it."""
    if not path or node is None:
        return node
    if isinstance(node, tuple):
        return [picked(item, path) for item in node]
    name, _, rest = path.partition(".")
    return picked(getattr(node, name), rest)
