"""Memory that leaves a device: the same tensors come back, bit for bit, views and tied ones too."""

from __future__ import annotations

import pytest
import torch

from rlstreams.workers.model import offload
from rlstreams.workers.model.offload import OffLoad


def test_tensors_come_back_in_place_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pieces of host memory smaller than they are; meanwhile the storage is empty."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 1000)
    whole = torch.randn(40, 30)
    rows = whole[3:5]
    whole[7, 7] = float("nan")
    others = [torch.randn(5, dtype=torch.bfloat16), torch.arange(700), torch.empty(0)]
    parameter = torch.nn.Parameter(torch.randn(17))
    before = [tensor.detach().clone() for tensor in (whole, rows, parameter, *others)]
    off = OffLoad("cpu")
    for _ in range(2):
        moved = off.give_up([whole, rows, parameter, *others])
        assert moved == whole.nbytes + parameter.nbytes + sum(t.nbytes for t in others)
        assert whole.untyped_storage().nbytes() == parameter.untyped_storage().nbytes() == 0
        off.take_back()
    for tensor, copy in zip((whole, rows, parameter, *others), before, strict=True):
        assert torch.equal(tensor.detach().view(torch.uint8), copy.view(torch.uint8))
    assert rows.data_ptr() == whole[3:5].data_ptr()
