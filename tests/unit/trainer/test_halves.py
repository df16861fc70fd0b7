"""A float32 number in two halves of 16 bits, by arithmetic on its bits."""

import numpy as np
import pytest
import torch

from rlstreams.workers.trainer.learn.adam import halves, joined

EDGES = [0, -1, 2**31 - 1, -(2**31), 0x7FFF8000, 0x7FFF7FFF, 0x8000, 0x7FFF, -0x8000, -0x8001]


def bits_of(kind: str) -> torch.Tensor:
    drawn = np.random.default_rng(0).integers(-(2**31), 2**31, (60, 7)).astype(np.int32)
    drawn.flat[: len(EDGES)] = EDGES
    bits = torch.from_numpy(drawn)
    return {"rows": bits, "columns": bits.T, "one": bits[0, 3], "none": bits[:0]}[kind]


@pytest.mark.parametrize("kind", ["rows", "columns", "one", "none"])
def test_halves_are_the_nearest_and_its_rest(kind: str) -> None:
    """Of any 32 bits and layout; joined they are the number again."""
    bits = bits_of(kind)
    high, low = halves(bits.view(torch.float32))
    nearest = (bits.long() + 0x8000) >> 16
    assert torch.equal(high.view(torch.int16), nearest.to(torch.int16))
    assert torch.equal(low.long(), bits.long() - (nearest << 16))
    assert torch.equal(joined(high, low).view(torch.int32), bits)
