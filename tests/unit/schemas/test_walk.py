"""Many positions at once go where one at a time goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas.varint import long_bytes, read_long
from rlstreams.schemas.walk import Walk

LONGS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-70, 70)


@given(numbers=st.lists(LONGS, min_size=1, max_size=8))
def test_longs_of_any_size_beside_each_other(numbers: list[int]) -> None:
    """One byte to ten."""
    walk = Walk([long_bytes(number) for number in numbers])
    found, ends = walk.long(walk.starts)
    assert found.tolist() == numbers
    assert ends.tolist() == walk.ends.tolist() == walk.past_long(walk.starts).tolist()


@pytest.mark.parametrize(
    "encoded", [b"\x80" * 10 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 9 + b"\x02", b"\x80" * 9]
)
def test_what_is_no_long_leads_beyond_all_ends(encoded: bytes) -> None:
    """More than 64 bits, or no end: reading them one at a time refuses them."""
    with pytest.raises((ValueError, IndexError)):
        read_long(encoded, 0)
    walk = Walk([b"\x02", encoded])
    _, ends = walk.long(walk.starts)
    assert ends[0] == 1
    assert ends[1] > walk.ends[1]


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_sized_bytes_begin_behind_their_length(sizes: list[int]) -> None:
    """Short and long ones beside each other."""
    walk = Walk([long_bytes(size) + bytes(size) for size in sizes])
    begin, end = walk.sized(walk.starts)
    assert (end - begin).tolist() == sizes
    assert end.tolist() == walk.ends.tolist() == walk.past_sized(walk.starts).tolist()


@pytest.mark.parametrize("length", [-1, -(1 << 63), 1 << 40, (1 << 63) - 1, 17])
def test_a_length_that_cannot_be_leads_beyond_all_ends(length: int) -> None:
    """Negative, or more than there is: never back, and never around."""
    walk = Walk([b"\x00", long_bytes(length), b"\x02\x00"])
    _, end = walk.sized(walk.starts)
    assert end[0] == 1
    assert end[1] > walk.ends[1]
    assert end[2] == walk.ends[2]


@given(lists=st.lists(st.lists(LONGS, max_size=5), min_size=1, max_size=5), blocks=st.booleans())
def test_items_are_passed_in_rounds(lists: list[list[int]], blocks: bool) -> None:
    """In one block, or in a block each; those without a further item wait."""

    def encoded(items: list[int]) -> bytes:
        if not blocks:
            count = long_bytes(len(items)) if items else b""
            return count + b"".join(map(long_bytes, items)) + b"\0"
        return b"".join(b"\x02" + long_bytes(item) for item in items) + b"\0"

    walk = Walk([encoded(items) for items in lists])
    found: list[list[int]] = [[] for _ in lists]

    def pass_item(at: np.ndarray, some: np.ndarray | slice, number: int) -> np.ndarray:
        values, at = walk.long(at)
        for owner, value in zip(np.arange(len(lists))[some].tolist(), values.tolist(), strict=True):
            assert len(found[owner]) == number
            found[owner].append(value)
        return at

    ends = walk.blocks(walk.starts, pass_item)
    assert found == lists
    assert ends.tolist() == walk.ends.tolist()
