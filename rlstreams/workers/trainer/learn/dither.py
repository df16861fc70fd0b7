"""float32 to bfloat16 without a dead zone: each element has a threshold of its own, for good.

Nearest rounding returns the old weight until a change reaches half the gap to the next number, and
adapters change all weights by less for tens of steps. Here an element goes to the next number as
soon as its share of the gap exceeds its threshold: of many elements at a tenth of the gap, a tenth
go. Thresholds are uniform and zero on average in every sum over a row or a column, so that a
layer's results are right on average at once (decision 0067). They follow from the layer's name
alone: every holder of the numbers gets the same bits, as does a redone step, and a version differs
from the one before only where the numbers do.
Axes: `OI` rows and columns of a matrix.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

_LOW = 0xFFFF  # bits of a float32 that bfloat16 lacks


class Dither(NamedTuple):
    """Thresholds of a matrix: row and column added up modulo 2^16. Two elements that share a row or
    a column, or neither, have independent ones."""

    rows_O: Tensor  # int32, 0 to 65535
    columns_I: Tensor

    @classmethod
    def of(cls, name: str, shape: torch.Size, device: torch.device) -> Dither:
        """Thresholds for the layer of this name."""
        draw = torch.Generator().manual_seed(seed_of(f"{name}:rounding"))
        drawn = (torch.randint(_LOW + 1, (size,), generator=draw) for size in shape)
        return cls(*(values.to(device, torch.int32) for values in drawn))


def seed_of(name: str) -> int:
    """A seed that depends on a name alone, 56 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def rounded(whole_OI: Tensor, dither: Dither) -> Tensor:
    """`whole_OI`, float32, rounded to bfloat16; the input is overwritten. Numbers that bfloat16 has
    exactly stay, as do infinities and NaN."""
    is_nan_OI = whole_OI.isnan()
    bits_OI = whole_OI.view(torch.int32)
    bits_OI += (dither.rows_O[:, None] + dither.columns_I).bitwise_and_(_LOW)
    bits_OI >>= 16
    found_OI = bits_OI.to(torch.int16).view(torch.bfloat16)
    return found_OI.masked_fill_(is_nan_OI, torch.nan)
