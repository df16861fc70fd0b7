"""`rlstreams config ...`: the resolved configuration, who set what, and what each field is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rlstreams.cli.arguments import CONFIG, command, group
from rlstreams.streams.log.errors import ConfigError

group("config", "show and explain the configuration")


@command("config show", CONFIG)
def run(args: argparse.Namespace) -> int:
    """print every field, its value and its origin

    --json       as one JSON object, without origins
    --why FIELD  explain one field and where its value is set

    rlstreams config show
    rlstreams config show base.toml mine.toml --why trainer.optimizer.lr
    rlstreams config show run.toml --json --trainer.steps=3
    """
    from rlstreams.workers.config.load import load_with_origins, resolved_json

    loaded = load_with_origins(args.config, args.overrides)
    resolved = resolved_json(loaded.config)
    if args.why:
        print("\n".join(why(args.why, json.loads(resolved), loaded.history)))
    elif args.json:
        print(resolved)
    else:
        print("\n".join(toml_lines(json.loads(resolved), loaded.origins)))
    return 0


@command("config schema")
def run_schema(args: argparse.Namespace) -> int:
    """print a JSON Schema for editors

    rlstreams config schema > rlstreams.schema.json
    """
    del args
    from rlstreams.workers.config.docs import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


@command("config fields")
def run_fields(args: argparse.Namespace) -> int:
    """print every field as a page in Markdown

    rlstreams config fields > configuration.md
    """
    del args
    from rlstreams.workers.config.docs import page

    print(page(), end="")
    return 0


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
    """What a field is, its value, and every layer's word on it; the last one counts.

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
    """Whether a table is a value of somebody's, inside of a free one."""
    from rlstreams.workers.config.fields import field_type, is_free_table

    *above, _ = name.split(".")
    return bool(above) and is_free_table(field_type(above))
