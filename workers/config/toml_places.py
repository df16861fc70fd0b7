"""Line and column of each key of a TOML text, which `tomllib` does not give, for messages.

Reads texts that `tomllib` has accepted, so it only has to find where statements begin and end.
Keys inside inline tables have the place of the key that holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Place = tuple[int, int]  # line and column, from 1

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
_DOTTED = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_TABLE = re.compile(rf"\[\[?[ \t]*({_DOTTED})[ \t]*\]\]?")
_ASSIGNMENT = re.compile(rf"({_DOTTED})[ \t]*=")
_PART = re.compile(_KEY)
_STRINGS = (
    r'"""(?:\\.|[^\\])*?"{3,5}',
    r"'{3}.*?'{3,5}",
    r'"(?:\\.|[^"\\\n])*"',
    r"'[^'\n]*'",
)
_VALUE = re.compile("|".join([*_STRINGS, r"#[^\n]*", "."]), re.DOTALL)


def toml_places(text: str) -> Mapping[str, Place]:
    """Line and column of each dotted key; of a key that occurs more than once the first."""
    places: dict[str, Place] = {}
    table: list[str] = []
    at = 0
    while True:
        at = _match(_BLANK, text, at).end()
        if at == len(text):
            return places
        header = _TABLE.match(text, at)
        found = header or _ASSIGNMENT.match(text, at)
        if found is None:  # not what tomllib accepts
            return places
        keys = [part.strip("\"'") for part in _PART.findall(found.group(1))]
        if header:
            table = keys
        name = ".".join(keys if header else [*table, *keys])
        places.setdefault(name, place_of(text, at))
        at = found.end() if header else _end_of_value(text, found.end())


def place_of(text: str, index: int) -> Place:
    """Line and column of a character."""
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


def _end_of_value(text: str, at: int) -> int:
    depth = 0
    for token in _tokens(text, at):
        at = token.end()
        if token.group() in ("[", "{"):
            depth += 1
        elif token.group() in ("]", "}"):
            depth -= 1
        elif token.group() == "\n" and depth == 0:
            break
    return at


def _tokens(text: str, at: int) -> Iterator[re.Match[str]]:
    while token := _VALUE.match(text, at):
        yield token
        at = token.end()


def _match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    found = pattern.match(text, at)
    assert found is not None  # the pattern matches nothing, too
    return found
