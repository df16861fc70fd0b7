"""Writers' schemas that are not in the package: their writers are unknown, so reading must end.

Avro allows schemas under which a few bytes take for ever: a type that holds itself recurses as deep
as a record is long, an array whose items take no bytes may name any number of them, and records
that take no bytes, each twice within the next one, are more than anybody can count. No event of
ours has any of these; rather than crash or hang, such records are unreadable.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from rlstreams.schemas.avro import parsing_form


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
    """Return the fewest bytes that a value of a schema takes.

    Args:
        names: fewest bytes of each named type so far; None: the type is still being measured.

    Raises:
        ValueError: see `writer_schema`.
    """
    if isinstance(schema, str):
        known = names.get(schema, 0 if schema == "null" else 1)
        if known is None:
            raise ValueError(f"type {schema} holds itself")
        return known
    if isinstance(schema, list):  # a union: its branch comes first
        return 1 + min(_least_bytes(branch, names) for branch in schema)
    kind = schema["type"]
    if kind in ("array", "map"):
        inner = schema["items" if kind == "array" else "values"]
        if not _least_bytes(inner, names) and kind == "array":
            raise ValueError(f"items of an array take no bytes: {inner}")
        return 1
    if "name" not in schema:
        return _least_bytes(kind, names)
    names[schema["name"]] = None  # a record, an enum or a fixed
    least = int(schema.get("size", 1))
    if "fields" in schema:
        least = sum(_least_of_field(field, names) for field in schema["fields"])
    names[schema["name"]] = least
    return least


def _least_of_field(field: Any, names: dict[str, int | None]) -> int:  # noqa: ANN401
    least = _least_bytes(field["type"], names)
    if not least and field["type"] != "null":
        raise ValueError(f"field {field['name']} takes no bytes: {str(field['type'])[:80]}")
    return least
