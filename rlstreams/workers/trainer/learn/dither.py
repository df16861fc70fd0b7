"""float32 to bfloat16 without a dead zone: each element has a threshold of its own, for good.

Nearest rounding gives a weight back as it was until a change reaches half the gap to the next one,
and adapters change all weights by less for tens of steps. Here an element goes to the next number
as soon as the share of the gap that it has come is above its threshold: of many that have come a
tenth, a tenth do. Thresholds are uniform and zero on average in every sum over a row or a column,
so that what a layer computes is right on average at once (decision 0067).
They follow from the layer's name alone: every holder of the numbers gets the same bits, a step that
is done again as well, and a version differs from the one before only where the numbers do.
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
        """Those of the layer of this name."""
        draw = torch.Generator().manual_seed(seed_of(f"{name}:rounding"))
        drawn = (torch.randint(_LOW + 1, (size,), generator=draw) for size in shape)
        return cls(*(values.to(device, torch.int32) for values in drawn))


def seed_of(name: str) -> int:
    """A seed that depends on a name alone, 56 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def rounded(whole_OI: Tensor, dither: Dither) -> Tensor:
    """As bfloat16; `whole_OI`, float32, is written over. What bfloat16 has exactly stays, as do
    infinities and NaN."""
    is_nan_OI = whole_OI.isnan()
    bits_OI = whole_OI.view(torch.int32)
    bits_OI += (dither.rows_O[:, None] + dither.columns_I).bitwise_and_(_LOW)
    bits_OI >>= 16
    found_OI = bits_OI.to(torch.int16).view(torch.bfloat16)
    return found_OI.masked_fill_(is_nan_OI, torch.nan)
