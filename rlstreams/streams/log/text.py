"""Text for people and other programs: counts, times, ends of log files, JSON."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16  # of a log file: after days, one may be larger than memory
_DIGITS = re.compile(r"([0-9]+)")


def counted(number: int, one: str, many: str = "") -> str:
    """Return a count with its noun: `1 step`, `1,200 steps`; many: the plural, else `one` + s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def by_number(text: str) -> tuple[str | int, ...]:
    """Return the key that sorts texts by the numbers in them: `2/1` before `10/0`."""
    return tuple(int(part) if at % 2 else part for at, part in enumerate(_DIGITS.split(text)))


def utc_text(at_ms: int) -> str:
    """Return `2026-11-18 11:06:40`, in UTC; outside of years 1 to 9999 the ms since 1970."""
    try:
        when = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"
    return f"{when:%Y-%m-%d %H:%M:%S}"


def tail(path: Path, num_lines: int) -> Sequence[str]:
    """Return the last lines of a file, from its last `TAIL_BYTES`; none if there is no file."""
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return text.splitlines()[-num_lines:]


def plain_json(value: object, **options: Any) -> str:  # noqa: ANN401
    """Return `value` as JSON that every reader takes; the options are those of `json.dumps`.

    NaN and infinity become null: Python's words for these are no JSON (RFC 8259).
    """
    plain = {"ensure_ascii": False, "allow_nan": False, **options}
    try:
        return json.dumps(value, **plain)
    except ValueError:  # rare, so only then is the tree walked
        return json.dumps(_finite(value), **plain)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
