"""Copies of tensors in the host's memory, which leave the driver to others.

A copy from a GPU straight into ordinary memory holds the driver until it is over, while a
broadcast of weights waits (infra/decisions/0099-a-checkpoint-is-written-beside-training.md). So the
bytes go through two pinned pieces of memory by turns: the card fills one by itself, while the host
empties the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 1 << 26


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of these tensors in the host's memory: contiguous, bit for bit, in storages of their
    own.

    Returns when all are whole. Values are taken from the mapping one after the other, in its order.
    """
    staging: Staging | None = None
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cuda":
            staging = staging or Staging(is_gpu=True)
            copies[name] = staging.copy(tensor)
        else:
            copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if staging is not None:
        staging.settle()
    return copies


class _Piece(NamedTuple):
    memory: Tensor  # uint8
    filled: torch.cuda.Event | None  # None: a copy is over when its call returns


class Staging:
    """Two pieces of memory between a device and the host."""

    def __init__(self, *, is_gpu: bool, piece_bytes: int = PIECE_BYTES) -> None:
        self._next, self._other = (
            _Piece(
                torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=is_gpu),
                # `blocking`: the thread that waits leaves its core to others.
                torch.cuda.Event(blocking=True) if is_gpu else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(2)
        )
        self._full: tuple[_Piece, Tensor] | None = None  # filled last, and the place of its bytes

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy, whose last bytes are there after another `copy` or `settle`."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        num = len(self._next.memory)
        there = torch.split(_bytes_of(copy), num)
        for some, place in zip(torch.split(_bytes_of(tensor), num), there, strict=True):
            piece = self._next
            piece.memory[: len(some)].copy_(some, non_blocking=True)
            if piece.filled is not None:
                piece.filled.record()
            self.settle()
            self._full = piece, place
            self._next, self._other = self._other, piece
        return copy

    def settle(self) -> None:
        """Empty the piece that was filled last, if any."""
        if self._full is None:
            return
        piece, place = self._full
        if piece.filled is not None:
            piece.filled.synchronize()
        place.copy_(piece.memory[: len(place)])
        self._full = None


def _bytes_of(tensor: Tensor) -> Tensor:
    """Its elements as one row of bytes; a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
