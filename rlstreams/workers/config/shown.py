"""A configuration for reading: as TOML with the origin of each value, and one field explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstreams.streams.log.errors import ConfigError


def toml_lines(tree: Mapping[str, Any], origins: Mapping[str, str], name: str = "") -> list[str]:
    """The tree as TOML, with `# origin` behind each value that is not a default."""
    from rlstreams.workers.config.docs import toml_key, toml_value

    lines = [f"[{name}]"] if name else []
    tables = []
    for key, value in tree.items():
        dotted = f"{name}.{key}" if name else key
        if isinstance(value, dict) and not _is_inline(dotted):
            tables += ["", *toml_lines(value, origins, dotted)]
        else:
            comment = f"  # {origins[dotted]}" if dotted in origins else ""
            lines.append(f"{toml_key(key)} = {toml_value(value)}{comment}")
    return [*lines, *tables]


def why(name: str, tree: Mapping[str, Any], history: Mapping[str, Any]) -> list[str]:
    """Lines of a field's meaning, its value, and every layer's value; the last one counts.

    Raises ConfigError: there is no such field.
    """
    from rlstreams.workers.config.docs import field_docs, section_docs, toml_value
    from rlstreams.workers.config.fields import FieldError, field_type, split_name

    keys = name.split(".")
    try:
        field_type(keys)
    except FieldError as err:
        raise ConfigError(f"--why: {err}") from err
    value: Any = tree
    for key in split_name(name):
        value = value.get(key, {}) if isinstance(value, dict) else value
    lines = [f"{name} = {toml_value(value)}"]
    if sentence := section_docs().get(name):
        lines = [f"[{name}]", f"  what    {sentence.splitlines()[0]}"]
    docs = [doc for doc in field_docs() if name == doc.name or name.startswith(f"{doc.name}.")]
    for doc in docs:
        lines += [f"  what    {doc.sentence}", f"  type    {doc.kind}"]
        lines += [f"  default {doc.default}"] if doc.default else []
        lines += [f"  change it when  {doc.symptom}"] if doc.symptom else []
    settings = [
        (setting.place, f"{entry} = " if entry != name else "", setting.value)
        for entry, layers in history.items()
        if entry == name or entry.startswith(f"{name}.")
        for setting in layers
    ]
    lines += ["  set by" if settings else "  not set: this is the default"]
    lines += [f"    {place}  {entry}{toml_value(value)}" for place, entry, value in settings]
    return lines


def _is_inline(name: str) -> bool:
    """Whether a table is a value inside of a free table."""
    from rlstreams.workers.config.fields import field_type, is_free_table

    *above, _ = name.split(".")
    return bool(above) and is_free_table(field_type(above))
