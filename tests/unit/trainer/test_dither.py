"""Rounding without a dead zone: what arrives is right on average, and the same bits each time."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from rlstreams.workers.trainer.learn.dither import Dither, rounded

CPU = torch.device("cpu")
SHAPE = torch.Size((64, 96))


def by_hand(whole: float, threshold: int) -> float:
    """The upper half of a float32's bits, and one more where the lower half reaches over."""
    (bits,) = struct.unpack("<I", struct.pack("<f", whole))
    upper, lower = divmod(bits, 1 << 16)
    upper += lower + threshold >= 1 << 16
    (found,) = struct.unpack("<f", struct.pack("<I", upper << 16))
    return found


def test_each_element_is_rounded_by_its_own_threshold() -> None:
    """Number by number, of both signs and many sizes."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(SHAPE, generator=draw) * 10.0 ** torch.randint(-6, 7, SHAPE, generator=draw)
    dither = Dither.of("layer", SHAPE, CPU)
    found = rounded(whole.clone(), dither).float()
    for row, column in [(0, 0), (5, 90), (63, 95), (17, 3), (40, 40)]:
        threshold = (int(dither.rows_O[row]) + int(dither.columns_I[column])) % (1 << 16)
        assert float(found[row, column]) == by_hand(float(whole[row, column]), threshold)


def test_thresholds_are_those_of_every_release() -> None:
    """A run of an older release is redone to the bit: drawn otherwise, its steps would drift."""
    drawn = Dither.of("layer", torch.Size((3, 2)), CPU)
    assert ([22911, 23477, 20113], [7978, 58114]) == (
        drawn.rows_O.tolist(),
        drawn.columns_I.tolist(),
    )


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.93])
def test_of_many_that_come_a_share_of_the_way_a_share_goes(share: float) -> None:
    """In all, in each row and in each column: five standard deviations of that many coins."""
    gap = 2.0**-8  # between 0.5 and 1
    whole = torch.full(SHAPE, 0.625 + share * gap)
    went = (rounded(whole, Dither.of("layer", SHAPE, CPU)).float() - 0.625) / gap
    assert {0.0, 1.0} == set(went.flatten().tolist())
    deviation = (share * (1 - share)) ** 0.5
    for mean, number in ((went.mean(), went.numel()), *sides(went)):
        assert abs(float(mean) - share) < 5 * deviation / number**0.5


def sides(went: Tensor) -> list[tuple[Tensor, int]]:
    """Means over columns and over rows, with the number of elements in each."""
    return [(m, SHAPE[1]) for m in went.mean(1)] + [(m, SHAPE[0]) for m in went.mean(0)]


def test_what_16_bits_hold_stays() -> None:
    """Zeros of both signs, the largest number, infinities, and whatever is no number."""
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    whole[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.3895e38, -3.3895e38])
    whole[0, 4:6] = whole[0, 4:6].bfloat16().float()
    bits = [0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF, 0x7F800001]
    whole[1, :5] = torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(
        torch.float32
    )
    found = rounded(whole.clone(), Dither.of("layer", SHAPE, CPU))
    assert found[1, :5].isnan().all()
    kept, expected = found.clone(), whole.bfloat16()
    kept[1, :5] = expected[1, :5] = 0
    assert torch.equal(kept.view(torch.int16), expected.view(torch.int16))


def test_thresholds_are_a_layer_s_own() -> None:
    """Of its name alone: the same again, and others under another name."""
    one, again, other = (Dither.of(name, SHAPE, CPU) for name in ("a", "a", "b"))
    assert torch.equal(one.rows_O, again.rows_O)
    assert torch.equal(one.columns_I, again.columns_I)
    assert not torch.equal(one.rows_O, other.rows_O)
