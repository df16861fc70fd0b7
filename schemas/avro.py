"""Load, fingerprint and compare the `.avsc` files."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from fastavro import parse_schema
from fastavro.schema import SchemaParseException, to_parsing_canonical_form
from fastavro.schema import fingerprint as _fingerprint

FOLDER = Path(__file__).parent
HISTORY = FOLDER / "history"


def schema_file(name: str) -> Path:
    """`StepCompleted` -> `.../step_completed.avsc`."""
    return FOLDER / f"{re.sub(r'(?<!^)(?=[A-Z])', '_', name).lower()}.avsc"


@cache
def schema_text(name: str) -> str:
    """The text of an event's schema, as it is published to the topic `schemas`."""
    return schema_file(name).read_text(encoding="utf-8")


@cache
def parsing_form(text: str) -> Any:  # noqa: ANN401  (fastavro's own untyped form)
    """A schema text as fastavro reads with it."""
    return parse_schema(json.loads(text), _write_hint=False)


@cache
def fingerprint(text: str) -> bytes:
    """CRC-64-AVRO of the parsing canonical form: 8 bytes, as they stand on the wire.

    The canonical form drops defaults and docs, so schemas that differ only in these share a
    fingerprint; the compatibility check refuses a second text under one fingerprint.
    """
    form = to_parsing_canonical_form(json.loads(text))
    return bytes.fromhex(_fingerprint(form, "CRC-64-AVRO"))


def fingerprint_of_foreign(text: str) -> bytes | None:
    """The same of a text that somebody else may have written; None if it is no schema."""
    try:
        return fingerprint(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the parser's own error for a schema that lacks a word is a KeyError
    except SchemaParseException:
        return None


def compatibility_errors(older: str, newer: str) -> list[str]:
    """Why `newer` may not follow `older` under FULL compatibility; empty if it may.

    FULL: each reads what the other wrote, so a field may only come or go with a default, and no
    name or type changes. Against every file of `history/` this is FULL_TRANSITIVE.
    """
    errors: list[str] = []
    old, new = _expanded(json.loads(older), {}), _expanded(json.loads(newer), {})
    _compare(old, new, "", errors)
    if not errors and older != newer and fingerprint(older) == fingerprint(newer):
        errors += _same_defaults(old, new, "")
    return sorted(errors)


def _expanded(schema: Any, names: dict[str, Any]) -> Any:  # noqa: ANN401
    """The schema with each later mention of a named type replaced by its definition."""
    if isinstance(schema, str):
        return names.get(schema, schema)
    if isinstance(schema, list):
        return [_expanded(branch, names) for branch in schema]
    schema = dict(schema)
    for key in ("type", "items", "values"):
        if key in schema:
            schema[key] = _expanded(schema[key], names)
    if schema["type"] == "record":
        schema["fields"] = [_expanded(field, names) for field in schema["fields"]]
        names[schema["name"]] = schema
    return schema


def _compare(old: Any, new: Any, path: str, errors: list[str]) -> None:  # noqa: ANN401
    if isinstance(old, dict) and isinstance(new, dict) and old.get("type") == new.get("type"):
        if old["type"] == "record":
            _compare_records(old, new, path or old["name"], errors)
        elif old["type"] == "array":
            _compare(old["items"], new["items"], f"{path}[]", errors)
        elif old["type"] == "map":
            _compare(old["values"], new["values"], f"{path}{{}}", errors)
        elif old != new:
            errors.append(f"{path}: type changed from {old} to {new}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            _compare(one, other, path, errors)
    elif old != new:
        errors.append(f"{path}: type changed from {_brief(old)} to {_brief(new)}")


def _compare_records(old: Any, new: Any, path: str, errors: list[str]) -> None:  # noqa: ANN401
    if old["name"] != new["name"]:
        errors.append(f"{path}: renamed to {new['name']}")
    if old.get("namespace") != new.get("namespace"):
        errors.append(
            f"{path}: namespace changed from {old.get('namespace')} to {new.get('namespace')}"
        )
    olds = {f["name"]: f for f in old["fields"]}
    news = {f["name"]: f for f in new["fields"]}
    for name in olds.keys() | news.keys():
        here = f"{path}.{name}"
        if name not in news and "default" not in olds[name]:
            errors.append(f"{here}: removed, but it has no default for older readers")
        elif name not in olds and "default" not in news[name]:
            errors.append(f"{here}: added without a default for older records")
        elif name in olds and name in news:
            _compare(olds[name]["type"], news[name]["type"], here, errors)


def _same_defaults(old: Any, new: Any, path: str) -> list[str]:  # noqa: ANN401
    """Differences of defaults: they would hide behind one fingerprint."""
    if isinstance(old, list):
        pairs = zip(old, new, strict=True)
        return [e for one, other in pairs for e in _same_defaults(one, other, path)]
    if not isinstance(old, dict):
        return []
    here = f"{path}.{old['name']}" if "name" in old else path
    errors = []
    if old.get("default") != new.get("default"):
        errors.append(f"{here}: default changed from {old.get('default')} to {new.get('default')}")
    for key in ("fields", "type", "items", "values"):
        if isinstance(old.get(key), dict | list):
            errors += _same_defaults(old[key], new[key], here)
    return errors


def _brief(schema: Any) -> str:  # noqa: ANN401
    return str(schema.get("name", schema["type"])) if isinstance(schema, dict) else str(schema)
