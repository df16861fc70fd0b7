"""Which heads of whole rows each rank of a shared row gets, without other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlstreams.workers.model import context
from rlstreams.workers.model.documents import attend


class Rank:
    """One of `size` that share a row; here each already has the whole row."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Turned:
    """What the exchange gives: this rank's heads of whole rows; on the way back all as it is."""

    @staticmethod
    def apply(group: Rank, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not to_heads:
            return tensors
        return tuple(tensor.chunk(group.size(), 1)[group.rank()] for tensor in tensors)


@pytest.mark.parametrize(("ranks", "key_heads"), [(4, 2), (8, 2), (8, 4), (4, 1), (2, 2), (4, 4)])
def test_a_rank_s_heads_meet_their_own_keys(
    ranks: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than heads of keys each of these is repeated, one behind the other: query
    head h reads key head h // (heads / key heads), as where rows are whole."""
    monkeypatch.setattr(context, "_Turned", Turned)
    draw = torch.Generator().manual_seed(0)
    heads, length, width = 8, 6, 4
    query, key, value = (
        torch.randn(1, num, length, width, generator=draw) for num in (heads, key_heads, key_heads)
    )
    module: Any = nn.Module()
    module.is_causal, module.num_key_value_groups = True, heads // key_heads
    whole, _ = attend(module, query, key, value, None, scaling=width**-0.5)
    for rank in range(ranks):
        found, _ = context._attention(
            module, query, key, value, None, Rank(rank, ranks), scaling=width**-0.5
        )
        expected = whole.chunk(ranks, 2)[rank]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
