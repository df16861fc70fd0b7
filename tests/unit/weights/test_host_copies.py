"""Copies in the host's memory: bit for bit, whole when they are returned, and of their own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.weights.host_copies import Staging, host_copies

TENSORS: Mapping[str, Tensor] = {
    "strided": torch.randn(40, 30).t()[:, ::2],
    "half": torch.randn(999).to(torch.bfloat16),
    "nan": torch.tensor([float("nan"), -0.0]),
    "scalar": torch.tensor(7.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "parameter": torch.nn.Parameter(torch.randn(17)),
}


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
def test_bytes_through_two_pieces_are_those_of_the_tensors(piece_bytes: int) -> None:
    staging = Staging(is_gpu=False, piece_bytes=piece_bytes)
    copies = {name: staging.copy(tensor) for name, tensor in TENSORS.items()}
    staging.settle()
    assert bits(TENSORS) == bits(copies)
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())


def test_a_piece_is_emptied_while_the_other_is_filled() -> None:
    """The last bytes of a copy come with the next one's first."""
    staging = Staging(is_gpu=False, piece_bytes=1 << 10)
    first = staging.copy(torch.ones(100))
    first.zero_()
    staging.copy(torch.zeros(100))
    assert torch.equal(torch.ones(100), first)


def test_copies_stay_as_they_are_while_the_tensors_change() -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in TENSORS.items()}
    before = bits(tensors)
    copies = host_copies(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    OffLoad("cpu").give_up(tensors.values())
    assert before == bits(copies)


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    """Type, shape and bytes of each."""
    return {
        name: (
            tensor.dtype,
            tensor.shape,
            tensor.detach().contiguous().view(-1).view(torch.uint8).tolist(),
        )
        for name, tensor in tensors.items()
    }
