"""The hash of a version: what it is of, what changes it, and what it must not depend on."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link import weight_hash as hashing
from rlstreams.workers.weights.link.weight_hash import sums_of
from tests.readme_blocks import schemas_page

ALL = 2**64
DIGITS = schemas_page()["digits"]  # schemas/README.md: as an independent reader computes it
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


def drawn(dtype: torch.dtype, num: int, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits."""
    size = num * torch.empty(0, dtype=dtype).element_size()
    highest = 2 if dtype is torch.bool else 256
    data = np.random.default_rng(seed).integers(0, highest, size, np.uint8)
    return torch.from_numpy(data).view(dtype) if num else torch.empty(0, dtype=dtype)


def found(tensor: torch.Tensor, start: int = 0) -> list[int]:
    return [number % ALL for number in sums_of(tensor, start).tolist()]


@given(st.sampled_from(DTYPES), st.integers(0, 70), st.integers(1, 9))
def test_the_sums_are_the_documented_ones(dtype: torch.dtype, num: int, chunk: int) -> None:
    """An independent reader can compute them; chunks do not show."""
    tensor = drawn(dtype, num)
    data = tensor.view(torch.uint8).numpy().tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_CPU_CHUNK", chunk)
        digits = "".join(f"{number:016x}" for number in found(tensor))
        assert digits == DIGITS(data, tensor.element_size())


def test_the_hash_is_the_documented_one() -> None:
    """A line for each tensor, in name order."""
    weights = {"b": torch.tensor(7), "a": torch.tensor([1.0, 2.0]), "c": torch.empty(0).byte()}
    content = b""
    for name, head in (("a", '"float32",[2]'), ("b", '"int64",[]'), ("c", '"uint8",[0]')):
        digits = DIGITS(weights[name].numpy().tobytes(), weights[name].element_size())
        content += f'["{name}",{head},"{digits}"]\n'.encode()
    assert weight_hash(weights) == hashlib.sha256(content).hexdigest()


@given(st.sampled_from(DTYPES), st.integers(0, 60), st.lists(st.integers(0, 60), max_size=4))
def test_shards_at_any_cut_add_up(dtype: torch.dtype, num: int, cuts: list[int]) -> None:
    """Each sums its own part, wherever it begins."""
    whole = drawn(dtype, num)
    borders = sorted({0, num, *(cut for cut in cuts if cut < num)})
    total = [0, 0]
    for first, end in pairwise(borders):
        part = found(whole[first:end], first)
        total = [(a + b) % ALL for a, b in zip(total, part, strict=True)]
    assert total == found(whole)


@given(st.sampled_from((1, 2, 4)), st.integers(0, 99), st.integers(0, 99), st.integers(0, 31))
def test_a_flipped_bit_and_swapped_words_show(size: int, one: int, other: int, bit: int) -> None:
    """In both sums."""
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    words = drawn(dtype, 100, seed=one)
    before = found(words)
    flipped = words.clone().numpy()
    flipped.view(f"u{size}")[one] ^= 1 << bit % (8 * size)
    assert all(a != b for a, b in zip(before, found(torch.from_numpy(flipped)), strict=True))
    swapped = words.clone()
    swapped[one], swapped[other] = words[other], words[one]
    is_same = bool(words[one] == words[other])
    assert all((a == b) is is_same for a, b in zip(before, found(swapped), strict=True))


@given(st.integers(1, 50))
def test_content_that_moves_shows(by: int) -> None:
    """Also zeros, which a sum of plain products would pass over."""
    words = torch.zeros(200, dtype=torch.int16)
    words[:100] = drawn(torch.int16, 100)
    assert found(words) != found(words.roll(by))
    assert found(words[:100]) != found(torch.cat([torch.zeros(by).short(), words[:100]]))


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, -0.0])},  # equal in value, not in bits
        {"b": torch.tensor([1.0, 0.0])},
        {"a": torch.tensor([[1.0, 0.0]])},
        {"a": torch.tensor([1.0, 0.0], dtype=torch.float64)},
        {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([])},
    ],
)
def test_every_difference_changes_the_hash(other: dict[str, torch.Tensor]) -> None:
    """Bits, names, shapes, dtypes and the set of tensors all count."""
    assert weight_hash(other) != weight_hash({"a": torch.tensor([1.0, 0.0])})
