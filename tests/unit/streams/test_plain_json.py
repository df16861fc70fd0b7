"""JSON without words that JSON does not know."""

from __future__ import annotations

import json
import math

import pytest

from rlstreams.streams.log.text import plain_json


def strictly(text: str) -> object:
    """Parsed as RFC 8259 has it."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_null(number: float) -> None:
    """Wherever it stands; all else stays."""
    value = {"a": [1.5, number, {"b": (number, "ü")}], "c": True, "d": None}
    assert {"a": [1.5, None, {"b": [None, "ü"]}], "c": True, "d": None} == strictly(
        plain_json(value)
    )


def test_what_json_has_no_word_for_is_spelled_by_the_caller() -> None:
    """`default` is asked, and sorting and indenting are as they are for `json.dumps`."""
    value = {"b": b"x", "a": 1}
    assert '{\n  "a": 1,\n  "b": "x"\n}' == plain_json(
        value, indent=2, sort_keys=True, default=bytes.decode
    )


def test_a_ring_is_no_number() -> None:
    """Other mistakes pass through."""
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises((ValueError, RecursionError)):
        plain_json(ring)
