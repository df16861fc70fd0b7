"""The configuration as JSON Schema, so that an editor completes and checks a TOML file."""

from __future__ import annotations

from typing import Any

import msgspec

from rlstreams.workers.config.docs import field_docs
from rlstreams.workers.config.fields import item_of, sections, types_of
from rlstreams.workers.config.layers import EXTENDS
from rlstreams.workers.config.run import RunConfig


def json_schema() -> dict[str, Any]:
    """Draft 2020-12; fields have their sentence, unit and default, unknown ones are refused."""
    schema = msgspec.json.schema(RunConfig)
    definitions: dict[str, dict[str, Any]] = schema["$defs"]
    docs = {doc.name: doc for doc in field_docs()}
    for prefix, cls in sections():
        _describe(definitions[cls.__name__], f"{prefix}." if prefix else "", docs)
        for name, kind in types_of(cls).items():
            if item := item_of(kind):
                dotted = f"{prefix}.{name}" if prefix else name
                _describe(definitions[item.__name__], f"{dotted}[].", docs)
    top = definitions[RunConfig.__name__]
    top["properties"] = {
        EXTENDS: {
            "description": "Files to begin with, relative to this one, or `example:NAME.toml` of "
            "the package; what stands here wins.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        },
        **top["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlstreams",
        **schema,
    }


def _describe(definition: dict[str, Any], prefix: str, docs: dict[str, Any]) -> None:
    definition["additionalProperties"] = False
    for name, described in definition["properties"].items():
        if doc := docs.get(f"{prefix}{name}"):
            unit = f" [{doc.unit}]" if doc.unit else ""
            described["description"] = f"{doc.sentence}{unit}"
