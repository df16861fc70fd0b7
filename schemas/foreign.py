"""Writers' schemas that are not in the package: who wrote them is not known, so reading must end.

Avro allows schemas under which a few bytes take for ever: a type that holds itself recurses as deep
as a record is long, and an array whose items take no bytes may name any number of them. No event
of ours has either; rather than crash or hang, their records are unreadable.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from schemas.avro import parsing_form

_NO_BYTES = frozenset({"null"})
_RECORDS = frozenset({"record", "error"})
_NAMED = frozenset({"fixed", "enum"}) | _RECORDS


@cache
def writer_schema(text: str) -> Any:  # noqa: ANN401  (fastavro's own untyped form)
    """A foreign schema text as fastavro reads with it.

    Raises:
        ValueError, SchemaParseException: no schema, or one under which reading may not end.
    """
    form = parsing_form(text)
    _least_bytes(form, {})
    return form


def _least_bytes(schema: Any, names: dict[str, int | None]) -> int:  # noqa: ANN401
    """The fewest bytes that a value takes. `names`: of types so far; None: still being looked at.

    Raises:
        ValueError: see `writer_schema`.
    """
    if isinstance(schema, str):
        if schema not in names:
            return 0 if schema in _NO_BYTES else 1
        known = names[schema]
        if known is None:
            raise ValueError(f"type {schema} holds itself")
        return known
    if isinstance(schema, list):
        for branch in schema:
            _least_bytes(branch, names)
        return 1
    kind = schema["type"]
    if isinstance(kind, str) and kind in _NAMED:
        return _least_of_named(schema, kind, names)
    if kind == "array":
        if not _least_bytes(schema["items"], names):
            raise ValueError(f"items of an array take no bytes: {schema['items']}")
        return 1
    if kind == "map":
        _least_bytes(schema["values"], names)
        return 1
    return _least_bytes(kind, names)


def _least_of_named(schema: Any, kind: str, names: dict[str, int | None]) -> int:  # noqa: ANN401
    name = schema["name"]
    names[name] = None
    least = 1
    if kind == "fixed":
        least = int(schema["size"])
    elif kind in _RECORDS:
        least = sum(_least_bytes(field["type"], names) for field in schema["fields"])
    names[name] = least
    return least
