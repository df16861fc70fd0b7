"""User code as the configuration names it, and the free tables that it is called with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rlstreams.streams.log.secrets import resolve_secret

# Any: what lies inside arrays and tables is for its receiver to judge.
Option: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any]


def resolved(options: Mapping[str, Option], field: str) -> dict[str, Option]:
    """The options with `env:NAME` and `file:PATH` replaced by what they name.

    Args:
        field: in front of an option's name, for messages.

    Raises:
        ConfigError: a variable is not set, or a file cannot be read.
    """
    return {
        name: resolve_secret(value, f"{field}{name}") if isinstance(value, str) else value
        for name, value in options.items()
    }


def located(name: str) -> tuple[str, str, str] | None:
    """File, module and name of `file.py:name` or `module:name`; None: it is neither."""
    place, colon, code = name.rpartition(":")
    if not colon or not code.isidentifier():
        return None
    if place.endswith(".py"):
        return str(Path(place).resolve()), "", code
    return ("", place, code) if re.fullmatch(r"\w+(\.\w+)*", place) else None
