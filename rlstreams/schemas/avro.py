"""The `.avsc` files: their texts and fingerprints."""

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
    """Return the text of an event's schema, as it is published to the topic `schemas`."""
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
    """Return the fingerprint of a text of any origin; None if the text is no schema."""
    try:
        return fingerprint(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the parser raises a bare KeyError for a schema that lacks an attribute
    except SchemaParseException:
        return None
