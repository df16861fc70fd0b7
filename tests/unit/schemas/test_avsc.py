"""The `.avsc` files and the dataclasses say the same, and the fingerprint is Avro's."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rlstreams import schemas
from rlstreams.schemas import EVENTS, fingerprint, schema_text
from rlstreams.schemas.avro import FOLDER, schema_file
from rlstreams.schemas.shapes import fields_of, shape_of

WRITE = "python -m tests.unit.schemas.write writes schemas, history and golden bytes"


def avro_of(kind: Any, defined: set[type]) -> Any:
    """The Avro type that an annotation stands for; a record is spelled out once."""
    shape, inner = shape_of(kind)
    if shape == "optional":
        return ["null", avro_of(inner, defined)]
    if shape == "array":
        return {"type": "array", "items": avro_of(inner, defined)}
    if shape == "map":
        return {"type": "map", "values": avro_of(inner, defined)}
    if shape != "record":
        return shape
    if inner in defined:
        return inner.__name__
    defined.add(inner)
    fields = [
        {"name": name, "type": avro_of(kind, defined), **default_of(inner, name)}
        for name, kind in fields_of(inner)
    ]
    return {"type": "record", "name": inner.__name__, "fields": fields}


def default_of(cls: Any, name: str) -> dict[str, Any]:
    field = cls.__dataclass_fields__[name]
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    if field.default is dataclasses.MISSING:
        return {}
    value = field.default
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    return {"default": list(value) if isinstance(value, tuple) else value}


def bare(schema: Any) -> Any:
    """A schema without its words."""
    if isinstance(schema, list):
        return [bare(item) for item in schema]
    if isinstance(schema, dict):
        return {k: bare(v) for k, v in schema.items() if k not in ("doc", "namespace")}
    return schema


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_schema_is_the_dataclass(cls):
    """Names, order, types and defaults of the file are those of the class."""
    schema = json.loads(schema_text(cls.__name__))
    assert avro_of(cls, set()) == bare(schema), f"{cls.__name__}: {WRITE}"
    assert schema["namespace"] == "rlstreams"


def test_every_file_belongs_to_an_event():
    """No schema file is left over from an event that is gone."""
    assert {schema_file(cls.__name__) for cls in EVENTS} == set(FOLDER.glob("*.avsc"))


def test_fingerprint_is_the_published_algorithm():
    """The vector is the one of Avro's own test data for the schema "int", lowest byte first."""
    assert (0x7275D51A3F395C8F).to_bytes(8, "little") == fingerprint('"int"')


def test_fingerprints_differ():
    assert len(EVENTS) == len({fingerprint(schema_text(cls.__name__)) for cls in EVENTS})


def test_exports_exist():
    assert len(set(schemas.__all__)) == len(schemas.__all__)
    assert [] == [name for name in schemas.__all__ if not hasattr(schemas, name)]
