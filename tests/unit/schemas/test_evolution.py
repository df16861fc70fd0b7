"""Every schema ever released and the present one read each other's records."""

from __future__ import annotations

import io
import json

import pytest
from fastavro import schemaless_reader, schemaless_writer
from fastavro.utils import generate_one

from rlstreams.schemas import EVENTS, fingerprint, schema_text
from rlstreams.schemas.avro import HISTORY, parsing_form, schema_file
from tests.unit.schemas.test_avsc import WRITE, bare
from tests.unit.schemas.write import text_of


def fields_read(writer: str, reader: str) -> set[str]:
    """Of random records of the one schema, read with the other by an independent implementation."""
    written, found = parsing_form(writer), set()
    for _ in range(40):  # each branch of a union comes up
        stream = io.BytesIO()
        schemaless_writer(stream, written, generate_one(written))
        stream.seek(0)
        found |= schemaless_reader(stream, written, parsing_form(reader)).keys()
    return found


def fields_of(text: str) -> set[str]:
    return {field["name"] for field in json.loads(text)["fields"]}


@pytest.mark.parametrize("path", sorted(HISTORY.glob("*.avsc")), ids=lambda path: path.stem)
def test_the_present_schema_and_every_released_one_read_each_other(path):
    """FULL_TRANSITIVE: fields come and go with a default, and no name or type changes."""
    released = path.read_text(encoding="utf-8")
    name = json.loads(released)["name"]
    present = schema_text(name)
    assert f"{schema_file(name).stem}.{fingerprint(released).hex()}" == path.stem
    assert fields_of(present) == fields_read(released, present)
    assert fields_of(released) == fields_read(present, released)


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_the_present_schema_is_in_the_history(cls):
    """Whoever changes a schema adds its text, its defaults too: readers of old logs need them."""
    text = schema_text(cls.__name__)
    path = HISTORY / f"{schema_file(cls.__name__).stem}.{fingerprint(text).hex()}.avsc"
    assert path.exists(), f"{path} is not there: {WRITE}"
    assert bare(json.loads(text)) == bare(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_what_writes_schemas_keeps_their_words(cls):
    """The files are as it would write them: a change shows what has changed, and nothing else."""
    assert text_of(cls) == schema_text(cls.__name__)
