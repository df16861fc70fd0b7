"""Nearest known name to a misspelled one: the end of a message, or nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path


def meant(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'NAME'?`, of those that there are; empty if none is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""


def meant_file(path: str | Path) -> str:
    """As `meant_path`; a field's value, written as other programs take it, has other advice."""
    if re.match(r"\+*\w+(\.\w+)+=", str(path)):
        return f"; a field's value is written --{str(path).lstrip('+')}"
    return meant_path(path)


def meant_path(path: str | Path) -> str:
    """The same for files beside `path`, or beside the first folder above it that is not there.

    A folder that cannot be read has no near name.
    """
    missing = Path(path)
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    try:
        beside = os.listdir(missing.parent)
    except OSError:
        return ""
    if near := nearest(missing.name, beside):
        return f"; did you mean {str(missing.parent / near)!r}?"
    return f"; there is no {str(missing)!r} either" if missing != Path(path) else ""


def meant_toml(what: str) -> str:
    """Advice on what Python says of malformed TOML; empty where that says enough."""
    advice = {
        "Invalid value": "a text stands in quotes, `true` and `false` are in small letters",
        "Illegal character '\\n'": "its closing quote is missing",
        "Cannot overwrite a value": "the field is set above already",
        "Expected '=' after a key": "a line is `field = value`, or a `[section]`",
    }
    return next((f"; {text}" for said, text in advice.items() if what.startswith(said)), "")


def nearest(name: str, names: Iterable[str]) -> str:
    """The nearest of these names; empty if none is near."""
    from difflib import get_close_matches  # 5 ms, for messages alone

    return next(iter(get_close_matches(name, sorted(names), n=1)), "")
