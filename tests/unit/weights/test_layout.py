"""The layout of a version, and the words for what differs between two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import (
    layout_difference,
    layout_of,
    parse_layout,
)


def test_differences_are_named() -> None:
    expected = layout_of({n: torch.zeros(2) for n in "abcdef"})
    found = layout_of({"a": torch.zeros(3), "b": torch.zeros(2), "x": torch.zeros(2)})
    assert layout_difference(expected=expected, found=expected) == ""
    text = layout_difference(expected=expected, found=found)
    assert text == "c is missing; d is missing; e is missing and 3 more"
    shapes = layout_difference(expected=layout_of({"a": torch.zeros(2)}), found='[["a","int8",[]]]')
    assert shapes == "a should be float32 [2], is int8 []"


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "7",
        "[1]",
        '[["a","float32"]]',
        '[["b","f",[]],["a","f",[]]]',
        '[["a","f",[]],["a","f",[]]]',
    ],
)
def test_what_is_no_layout_is_refused(layout: str) -> None:
    with pytest.raises(WeightError):
        parse_layout(layout)


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_a_layout_survives_its_text(shapes: dict[str, list[int]]) -> None:
    """Any names and shapes come back in name order."""
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    parsed = parse_layout(layout_of(weights))
    assert parsed == [(n, "float32", tuple(s)) for n, s in sorted(shapes.items())]
