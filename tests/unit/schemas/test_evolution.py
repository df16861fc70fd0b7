"""Every schema ever released and the present one read each other's records."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rlstreams.schemas import EVENTS, fingerprint, schema_text
from rlstreams.schemas.avro import HISTORY, schema_file

BASE: dict[str, Any] = {
    "type": "record",
    "name": "Fact",
    "namespace": "rlstreams",
    "fields": [
        {"name": "run", "type": "string"},
        {"name": "step", "type": "long", "default": 0},
        {"name": "parts", "type": {"type": "array", "items": "long"}, "default": []},
        {"name": "metrics", "type": {"type": "map", "values": "double"}, "default": {}},
        {
            "name": "first",
            "type": {
                "type": "record",
                "name": "Tensor",
                "fields": [{"name": "dtype", "type": "string"}],
            },
        },
        {"name": "second", "type": ["null", "Tensor"], "default": None},
    ],
}


def changed(**fields: Any) -> str:
    """The schema with fields replaced, added, or (None) removed."""
    schema = json.loads(json.dumps(BASE))
    names = [f["name"] for f in schema["fields"]]
    for name, new in fields.items():
        if name not in names:
            schema["fields"].append({"name": name, **new})
        elif new is None:
            schema["fields"] = [f for f in schema["fields"] if f["name"] != name]
        else:
            schema["fields"] = [
                {"name": name, **new} if f["name"] == name else f for f in schema["fields"]
            ]
    return json.dumps(schema)


ARRAY_OF_TEXT = {"type": {"type": "array", "items": "string"}, "default": []}
OTHER_TENSOR = {
    "type": {
        "type": "record",
        "name": "Tensor",
        "fields": [{"name": "dtype", "type": "string"}, {"name": "codec", "type": "string"}],
    }
}


@pytest.mark.parametrize(
    ("newer", "error"),
    [
        (changed(run=None), "Fact.run: removed, but it has no default"),
        (changed(epoch={"type": "long"}), "Fact.epoch: added without a default"),
        (changed(run={"type": "long"}), "Fact.run: type changed from string to long"),
        (changed(run={"type": ["null", "string"]}), "Fact.run: type changed from string to"),
        (changed(parts=ARRAY_OF_TEXT), r"Fact.parts\[\]: type changed from long to string"),
        (
            changed(metrics={"type": {"type": "map", "values": "long"}, "default": {}}),
            "Fact.metrics{}: type changed from double to long",
        ),
        (changed(step={"type": "long", "default": 1}), "step: default changed from 0 to 1"),
        (changed(first=OTHER_TENSOR), "Fact.first.codec: added without a default"),
        (changed(second={"type": ["null", "string"], "default": None}), "Fact.second: type"),
        (json.dumps({**BASE, "name": "Other"}), "Fact: renamed to Other"),
        (json.dumps({**BASE, "namespace": "x"}), "Fact: namespace changed from rlstreams to x"),
    ],
)
def test_each_kind_of_break_is_named(newer, error):
    """A change that some reader could not follow is refused, with the field."""
    errors = compatibility_errors(json.dumps(BASE), newer)
    assert any(re.search(error, message) for message in errors), errors


@pytest.mark.parametrize(
    "newer",
    [
        json.dumps(BASE),
        json.dumps({**BASE, "doc": "new words"}),
        changed(step=None),
        changed(epoch={"type": "long", "default": 0}),
        json.dumps({**BASE, "fields": [BASE["fields"][4], *BASE["fields"][:4], BASE["fields"][5]]}),
    ],
    ids=["same", "doc", "removed with default", "added with default", "reordered"],
)
def test_what_may_change_may_change(newer):
    """The check lets through what both sides can read."""
    assert [] == compatibility_errors(json.dumps(BASE), newer)


@pytest.mark.parametrize("path", sorted(HISTORY.glob("*.avsc")), ids=lambda path: path.stem)
def test_present_schema_follows_every_released_one(path):
    """FULL_TRANSITIVE: against each release, not only the last."""
    released = path.read_text(encoding="utf-8")
    name = json.loads(released)["name"]
    assert f"{schema_file(name).stem}.{fingerprint(released).hex()}" == path.stem
    assert [] == compatibility_errors(released, schema_text(name))


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_present_schema_is_in_the_history(cls):
    """Whoever changes a schema adds its text: readers of old logs need every one of them."""
    text = schema_text(cls.__name__)
    path = HISTORY / f"{schema_file(cls.__name__).stem}.{fingerprint(text).hex()}.avsc"
    assert path.exists(), f"copy {schema_file(cls.__name__).name} to {path}"


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


def _expanded(schema: Any, names: dict[str, Any]) -> Any:
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


def _compare(old: Any, new: Any, path: str, errors: list[str]) -> None:
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


def _compare_records(old: Any, new: Any, path: str, errors: list[str]) -> None:
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


def _same_defaults(old: Any, new: Any, path: str) -> list[str]:
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


def _brief(schema: Any) -> str:
    return str(schema.get("name", schema["type"])) if isinstance(schema, dict) else str(schema)
