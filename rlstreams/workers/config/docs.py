"""Documentation of each field: its description, default, and when to change it.

The description is the docstring under the field in the source. `symptoms.toml` has, by dotted name,
the symptom of a wrong value; a test keeps the two and the generated page in sync.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlstreams.workers.config.checks import musts
from rlstreams.workers.config.fields import item_of, sections, types_of, wanted
from rlstreams.workers.config.layers import EXTENDS, leaves
from rlstreams.workers.config.run import RunConfig

SYMPTOMS = Path(__file__).with_name("symptoms.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDoc:
    """One field."""

    name: str  # dotted; a field of an array of tables as `demo.kills[].role`
    kind: str  # its type in words
    default: str  # as TOML; empty: it must be given
    sentence: str
    symptom: str  # the sign of a wrong value; empty: not written yet


@functools.cache
def field_docs() -> Sequence[FieldDoc]:
    """Every field, in the order of the sections."""
    symptoms = dict(leaves(tomllib.loads(SYMPTOMS.read_text(encoding="utf-8"))))
    found: list[FieldDoc] = []
    for prefix, cls in sections():
        for doc in _of_class(cls, f"{prefix}." if prefix else "", symptoms):
            found.append(doc)
            if item := item_of(types_of(cls)[doc.name.rpartition(".")[2]]):
                found += _of_class(item, f"{doc.name}[].", symptoms)
    return tuple(found)


def section_docs() -> Mapping[str, str]:
    """The sentence of each table, by dotted name."""
    found = {name: inspect.getdoc(cls) or "" for name, cls in sections() if name}
    tables = ((name, item_of(kind)) for name, kind in types_of(RunConfig).items())
    return found | {f"[{name}]": inspect.getdoc(item) or "" for name, item in tables if item}


def page() -> str:
    """All fields as one Markdown page."""
    lines = [
        "# Configuration",
        "",
        "Every field with its default, as `rlstreams config fields` prints it; *When:* names what",
        "is seen if it should have another value. Files merge from left to right, each after the",
        "files that its `extends` names (`example:NAME.toml`: one that comes with the package);",
        "`--section.field VALUE` comes last. `rlstreams config show FILE --why FIELD` shows where",
        "a value comes from, `rlstreams config schema` prints a JSON Schema for editors.",
    ]
    of_sections = section_docs()
    for name, docs in _by_section(field_docs()):
        lines += ["", f"## `[{name}]`", "", of_sections[name], ""]
        for doc in docs:
            setting = doc.name.removeprefix(_prefix(name))
            if doc.default:
                setting += f" = {doc.default}"
            lines.append(f"- `{setting}`: {doc.sentence} *When:* {doc.symptom}.")
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """Draft 2020-12; fields have their sentence and default, unknown ones are refused."""
    schema = msgspec.json.schema(RunConfig)
    definitions: dict[str, dict[str, Any]] = schema["$defs"]
    docs = {doc.name: doc for doc in field_docs()}
    for prefix, cls in sections():
        _describe(definitions[cls.__name__], cls, f"{prefix}." if prefix else "", docs)
        for name, kind in types_of(cls).items():
            if item := item_of(kind):
                dotted = f"{prefix}.{name}" if prefix else name
                _describe(definitions[item.__name__], item, f"{dotted}[].", docs)
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


def toml_value(value: object) -> str:
    """A plain value as TOML: JSON's scalars and arrays are TOML's, its objects are not."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return json.dumps(value, ensure_ascii=False)


def toml_key(key: str) -> str:
    """A key, quoted where it must be."""
    return (
        key
        if key.replace("_", "").replace("-", "").isalnum() and key.isascii()
        else json.dumps(key)
    )


def _by_section(docs: Sequence[FieldDoc]) -> Iterator[tuple[str, list[FieldDoc]]]:
    names = list(section_docs())
    for name in names:
        prefix = _prefix(name)
        below = [
            d
            for d in docs
            if d.name.startswith(prefix) and "." not in d.name.removeprefix(prefix).split("[")[0]
        ]
        if below:
            yield name, below


def _prefix(section: str) -> str:
    """Prefix of a section's field names; an array of tables is `[name]`, its fields `name[].`."""
    return f"{section[1:-1]}[]." if section.startswith("[") else f"{section}."


def _of_class(cls: Any, prefix: str, symptoms: Mapping[str, str]) -> Iterator[FieldDoc]:  # noqa: ANN401
    sentences = _sentences(cls)
    for field in fields(cls):
        kind = types_of(cls)[field.name]
        if is_dataclass(kind):
            continue
        name = f"{prefix}{field.name}"
        yield FieldDoc(
            name=name,
            kind=wanted(kind),
            default=_default(field),
            sentence=sentences.get(field.name, ""),
            symptom=symptoms.get(name, ""),
        )


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return toml_value(msgspec.to_builtins(field.default))
    if field.default_factory is not MISSING:
        return toml_value(msgspec.to_builtins(field.default_factory()))
    return ""


def _sentences(cls: type) -> Mapping[str, str]:
    """The text under each field of a dataclass, its base's included, as one line."""
    found: dict[str, str] = {}
    for base in cls.__bases__:
        found |= _sentences(base) if is_dataclass(base) else {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            constant = text.value if isinstance(text, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                found[field.target.id] = " ".join(constant.value.split())
    return found


def _describe(
    definition: dict[str, Any],
    cls: Any,  # noqa: ANN401
    prefix: str,
    docs: dict[str, Any],
) -> None:
    definition["additionalProperties"] = False
    for name, must in musts(cls):
        if must.pattern:  # an editor offers the names
            field = definition["properties"][name]
            own = {"type": field.pop("type"), "pattern": must.pattern}
            field["anyOf"] = [{"enum": list(must.names)}, own]
    for name, described in definition["properties"].items():
        if doc := docs.get(f"{prefix}{name}"):
            described["description"] = doc.sentence
