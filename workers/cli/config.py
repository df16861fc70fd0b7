"""`rlstreams config show CONFIG...`: the resolved configuration, and who set what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("config", help="show the resolved configuration")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every field, its value and its origin")
    show.add_argument("config", nargs="+", metavar="CONFIG", help="TOML files; later ones win")
    show.add_argument("--json", action="store_true", help="as one JSON object, without origins")
    show.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what a run with these files and overrides would be told."""
    from workers.config_load import load_with_origins, resolved_json

    loaded = load_with_origins(args.config, args.overrides)
    resolved = resolved_json(loaded.config)
    if args.json:
        print(resolved)
    else:
        print("\n".join(toml_lines(json.loads(resolved), loaded.origins)))
    return 0


def toml_lines(tree: Mapping[str, Any], origins: Mapping[str, str], name: str = "") -> list[str]:
    """The tree as TOML, with `# origin` behind each value that is not a default."""
    lines = [f"[{name}]"] if name else []
    tables = []
    for key, value in tree.items():
        dotted = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            tables += ["", *toml_lines(value, origins, dotted)]
        else:
            comment = f"  # {origins[dotted]}" if dotted in origins else ""
            lines.append(f"{_key(key)} = {_value(value)}{comment}")
    return [*lines, *tables] if name else [*lines, *tables][1:]


def _key(key: str) -> str:
    return json.dumps(key) if "." in key else key


def _value(value: Any) -> str:  # noqa: ANN401
    """JSON's scalars and arrays are TOML's; its objects are not."""
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(_pairs(value)) + " }"
    return json.dumps(value, ensure_ascii=False)


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(key)} = {_value(value)}" for key, value in table.items())
