"""JSON that every reader takes: a number that is none (NaN, infinity) is null.

Python writes them as bare words, which RFC 8259 does not know: browsers, jq and Go refuse the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def plain_json(
    value: object,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
    separators: tuple[str, str] | None = None,
) -> str:
    """`value` as JSON, text as it is; the options are those of `json.dumps`."""

    def dumped(given: object) -> str:
        return json.dumps(
            given,
            indent=indent,
            sort_keys=sort_keys,
            default=default,
            separators=separators,
            ensure_ascii=False,
            allow_nan=False,
        )

    try:
        return dumped(value)
    except ValueError:  # rare, so only then is the tree walked
        return dumped(_finite(value))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
