"""The checksum of a transfer: what it must notice, and what it must not depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.weights.link.checksum import Checksum


def checksum(*batches: list[torch.Tensor]) -> str:
    made = Checksum()
    for batch in batches:
        made.add(batch)
    return made.hexdigest()


def content(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@given(size=st.integers(1, 700), place=st.integers(0, 699), bit=st.integers(0, 7))
def test_one_flipped_bit_is_noticed(size: int, place: int, bit: int) -> None:
    """Wherever it is, also in the bytes behind the last whole word."""
    data = content(size)
    flipped = data.clone()
    flipped[place % size] ^= 1 << bit
    assert checksum([data]) != checksum([flipped])


@given(st.integers(0, 63), st.integers(0, 63))
def test_two_words_that_changed_places_are_noticed(first: int, second: int) -> None:
    """A sum alone would not see it."""
    words = torch.arange(64, dtype=torch.int64)
    moved = words.clone()
    moved[first], moved[second] = words[second], words[first]
    assert (checksum([words.view(torch.uint8)]) == checksum([moved.view(torch.uint8)])) is (
        first == second
    )


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 5 * 2**20 + 3])
def test_equal_bytes_have_equal_checksums(size: int) -> None:
    """Wherever they lie in memory, aligned or not."""
    data = content(size)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert checksum([data]) == checksum([shifted])


def test_missing_bytes_are_noticed() -> None:
    """Zeros at the end count too."""
    assert checksum([torch.zeros(16, dtype=torch.uint8)]) != checksum(
        [torch.zeros(24, dtype=torch.uint8)]
    )
