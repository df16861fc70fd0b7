"""The fields of a `RunConfig`: their names and types, and the nearest one to a wrong name."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from rlstreams.workers.config.run import RunConfig

# Fields that a recorded configuration may have, and that no code reads any more.
REMOVED = ("weights.hold_s", "weights.window_s", "engine.routers", "deadlines.fence_s")
_BITS = 63  # of a whole number in an event, beside its sign
_TYPES: dict[Any, Mapping[str, Any]] = {}  # of each dataclass, resolved once


class FieldError(ValueError):
    """An unknown field; its message names it and the nearest one."""


def field_type(names: Sequence[str]) -> Any:  # noqa: ANN401
    """The type of a dotted field; of an entry of a free table, the type of its values.

    Raises:
        FieldError: there is no such field.
    """
    kind: Any = RunConfig
    for depth, name in enumerate(names):
        if is_free_table(kind):
            return typing.get_args(kind)[1]
        known = types_of(kind) if is_dataclass(kind) else {}
        if name not in known:
            here, wanted = ".".join(names[:depth]), ".".join(names[: depth + 1])
            if wanted in REMOVED:
                raise FieldError(f"{wanted} is no field any more: leave it out")
            raise FieldError(f"unknown field {wanted}{meant_field(here, name)}")
        kind = known[name]
    return kind


def split_name(name: str) -> list[str]:
    """The keys of a dotted name; an entry of a free table keeps its dots (`sasl.username`)."""
    keys = name.split(".")
    kind: Any = RunConfig
    for depth, key in enumerate(keys):
        if is_free_table(kind):
            return [*keys[:depth], ".".join(keys[depth:])]
        kind = types_of(kind).get(key) if is_dataclass(kind) else None
    return keys


def is_free_table(kind: Any) -> bool:  # noqa: ANN401
    """Whether it is a table whose keys are not ours to name."""
    return typing.get_origin(kind) is dict


def types_of(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Name and type of each field of a dataclass."""
    if cls not in _TYPES:
        hints = typing.get_type_hints(cls)
        _TYPES[cls] = {f.name: hints[f.name] for f in fields(cls)}
    return _TYPES[cls]


def sections() -> Iterator[tuple[str, type]]:
    """Dotted name and dataclass of every table, outer ones first; the whole has the name ``."""

    def below(cls: type, prefix: str) -> Iterator[tuple[str, type]]:
        yield prefix, cls
        for name, kind in types_of(cls).items():
            if is_dataclass(kind):
                yield from below(typing.cast("type", kind), f"{prefix}.{name}".lstrip("."))

    return below(RunConfig, "")


def item_of(kind: Any) -> Any:  # noqa: ANN401
    """The dataclass of an array of tables, else None."""
    item = next(iter(typing.get_args(kind)), None)
    return item if typing.get_origin(kind) is tuple and is_dataclass(item) else None


def wrong(kind: Any, value: Any) -> str:  # noqa: ANN401
    """Why `value` is no `kind`; empty if it is one."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"more than {_BITS} bits"
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as err:
        return str(err)
    return ""


def wanted(kind: Any) -> str:  # noqa: ANN401
    """A type in words."""
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        texts = "an array of whole numbers" if int in typing.get_args(kind) else "an array of texts"
        return "an array of tables" if item_of(kind) else texts
    if is_free_table(kind):
        return "a table"
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, "text, a number, true or false, an array or a table")


def meant_field(section: str, name: str) -> str:
    """`; did you mean ...?`: the same name below here, a like one here, the same elsewhere.

    Where nothing is like it: what there is.
    """
    import difflib

    known = [
        f"{prefix}.{field}".lstrip(".") for prefix, cls in sections() for field in types_of(cls)
    ]
    dotted = f"{section}.{name}" if section else name
    siblings = [n for n in known if n.rpartition(".")[0] == section]
    namesakes = [n for n in known if n.rpartition(".")[2] == name]
    close = (
        [n for n in namesakes if n.startswith(f"{section}.")]
        or difflib.get_close_matches(dotted, siblings, n=1, cutoff=0.85)
        or namesakes
        or [
            f"{section}.{n}".lstrip(".") for n in difflib.get_close_matches(name, _leaves(siblings))
        ]
    )
    if close:
        return f"; did you mean {close[0]}?"
    return f"; {section or 'a configuration'} has {', '.join(_leaves(siblings))}"


def _leaves(names: Sequence[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names]
