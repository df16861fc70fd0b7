"""The audit's table: samples and places as integers, groups in slots."""

from __future__ import annotations

import pytest

from rlstreams.streams.audit.table import Table, group_key, group_name, place_of, position_at


def test_a_group_that_turns_out_larger_keeps_what_is_known() -> None:
    """It moves to other slots, and its old ones are empty."""
    table = Table()
    number = table.group(7, 1, 2)
    slot = table.first[number] + 1
    table.flags[slot], table.scored_at[slot] = 5, 99
    assert table.group(7, 40, 2) == number
    moved = table.first[number] + 1
    assert (table.flags[moved], table.scored_at[moved], table.name(moved)) == (5, 99, "7/1")
    assert table.flags[slot] == 0


def test_ids_and_places_survive_as_integers() -> None:
    """Both ways, for training groups and evaluations; what cannot be is told apart."""
    for text in (b"0", b"7", b"123456789", b"e0-0", b"e12-345"):
        key = group_key(text)
        assert key is not None
        assert group_name(key).encode() == text
    assert [group_key(t) for t in (b"", b"x", b"01", b"-1", b"9" * 30, b"e1-x")] == [None] * 6
    assert position_at(place_of(11, 1 << 40)) == (11, 1 << 40)
    assert place_of(-1, 5) == place_of(0, -1) == place_of(0, 1 << 50) == -1


@pytest.mark.parametrize(
    "text", [b"9" * 19, b"9" * 5000, b"e0-" + b"9" * 5000, b"07", b"e1", b"\xb2"]
)
def test_what_is_no_group_of_ours_has_no_key(text: bytes) -> None:
    """Also where Python refuses to read so long a number."""
    assert group_key(text) is None
