"""The hash of a version and the words for what differs between two."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import (
    layout_difference,
    layout_of,
    parse_layout,
    size_bytes,
    weight_hash,
)
from rlstreams.workers.weights.link.hash_pieces import PIECE_BYTES
from rlstreams.workers.weights.link.weight_hash import WeightHash


def test_the_hash_is_the_documented_one() -> None:
    """An independent reader can compute it: a header line and a digest of the bytes."""
    content = b'["a","float32",[2]]\n' + _sha256(bytes.fromhex("0000803f00000040"))
    content += b'["b","int64",[]]\n' + _sha256((7).to_bytes(8, "little"))
    content += b'["c","uint8",[0]]\n'
    weights = {"b": torch.tensor(7), "a": torch.tensor([1.0, 2.0]), "c": torch.empty(0).byte()}
    assert weight_hash(weights) == hashlib.sha256(content).hexdigest()
    assert size_bytes(weights) == 16


@pytest.mark.parametrize("num_left", [0, 1])
def test_a_large_tensor_is_hashed_in_pieces(num_left: int) -> None:
    """Each 4 MiB counts by its own SHA-256, whichever thread was done first."""
    large = np.random.default_rng(0).integers(0, 256, 3 * PIECE_BYTES + num_left, np.uint8)
    content = b'["a","uint8",[%d]]\n' % len(large)
    for start in range(0, len(large), PIECE_BYTES):
        content += _sha256(large[start : start + PIECE_BYTES].tobytes())
    content += b'["b","uint8",[1]]\n' + _sha256(b"\x07")
    weights = {"a": torch.from_numpy(large), "b": torch.tensor([7], dtype=torch.uint8)}
    assert weight_hash(weights) == hashlib.sha256(content).hexdigest()


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


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


def test_memory_order_does_not_matter() -> None:
    """A transposed view hashes as its contiguous copy."""
    view = torch.arange(6.0).reshape(2, 3).T
    assert weight_hash({"a": view}) == weight_hash({"a": view.contiguous()})


def test_tensors_are_added_in_name_order() -> None:
    """Anything else would give one content two hashes."""
    digest = WeightHash()
    digest.add("b", torch.tensor(0.0))
    with pytest.raises(ValueError, match="'a' came after 'b'"):
        digest.add("a", torch.tensor(0.0))


def test_differences_are_named() -> None:
    """The first few names, what should be and what is."""
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
    """Not JSON, not triples, not in name order, or a name twice."""
    with pytest.raises(WeightError):
        parse_layout(layout)


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_a_layout_survives_its_text(shapes: dict[str, list[int]]) -> None:
    """Any names and shapes come back in name order."""
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    parsed = parse_layout(layout_of(weights))
    assert parsed == {n: ("float32", tuple(s)) for n, s in sorted(shapes.items())}
    assert list(parsed) == sorted(shapes)
