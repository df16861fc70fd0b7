"""The heads of whole rows that each rank of a shared row gets, without other processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlstreams.workers.model import context
from rlstreams.workers.model.documents import attend


class Exchange:
    """All ranks in turn, each in a pass of its own: what a rank gets is what others sent in the
    pass before."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        self._before: list[list[Tensor]] = []

    def __call__(self, sent_R: Tensor, group: str) -> Tensor:
        own = self._sent[int(group)]
        own.append(sent_R)
        if not self._before:
            return torch.zeros_like(sent_R)
        return torch.stack([theirs[len(own) - 1][int(group)] for theirs in self._before])

    def tick(self) -> None:
        """A pass of all ranks is over."""
        self._before, self._sent = self._sent, [[] for _ in range(self._ranks)]


@pytest.mark.parametrize(("ranks", "key_heads"), [(4, 2), (8, 2), (8, 4), (4, 1), (2, 2), (4, 4)])
def test_a_rank_s_heads_meet_their_own_keys(
    ranks: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than heads of keys each of these is repeated, one behind the other: query
    head h reads key head h // (heads / key heads), as where rows are whole."""
    draw = torch.Generator().manual_seed(0)
    heads, length, width = 8, 8, 4
    query, key, value = (
        torch.randn(1, num, length, width, generator=draw) for num in (heads, key_heads, key_heads)
    )
    module: Any = nn.Module()
    module.is_causal, module.num_key_value_groups = True, heads // key_heads
    whole, _ = attend(module, query, key, value, None, scaling=width**-0.5)
    peers = [context.Peers(str(rank), ranks) for rank in range(ranks)]
    slices = [[t.chunk(ranks, 2)[rank] for t in (query, key, value)] for rank in range(ranks)]

    def attend_by_slices() -> list[Tensor]:
        pairs = zip(peers, slices, strict=True)
        return [
            context._attention(module, *own, None, rank, scaling=width**-0.5)[0]
            for rank, own in pairs
        ]

    exchange = Exchange(ranks)
    monkeypatch.setattr(context, "_exchange", exchange)
    for _ in range(2):  # what is received first is known once all have sent
        attend_by_slices()
        exchange.tick()
    torch.testing.assert_close(torch.cat(attend_by_slices(), 1), whole, rtol=1e-5, atol=1e-6)
