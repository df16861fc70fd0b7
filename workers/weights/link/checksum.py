"""A checksum that a GPU makes in passing, of bytes as they lie in memory.

For each piece: its bytes as int64 in a near-square table; the sums of its rows and of its columns,
weighted by odd numbers that differ by position, everything modulo 2^64. Two reads of the data, no
large intermediate, and sums of integers do not depend on order: the CPU gets the same number. It
finds flipped, missing, stale and misplaced bytes; it is no protection against an adversary.
"""

from __future__ import annotations

import hashlib
import math

import torch

_SPREAD = -7046029254386353131  # 2^64 / golden ratio, odd
_WORD = 8  # bytes


class Checksum:
    """Over pieces, in sending order."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        """One more piece: flat uint8, on any device; runs on the current stream."""
        self._sums.append(_sums(piece))

    def hexdigest(self) -> str:
        """16 hexadecimal digits; waits for the device."""
        if not self._sums:
            return hashlib.sha256().hexdigest()[:16]
        numbers = torch.stack(self._sums).cpu().numpy().astype("<i8")
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def _sums(piece: torch.Tensor) -> torch.Tensor:
    """(3,) int64: length, rows, columns and rest."""
    num_words = piece.numel() // _WORD
    width = max(1, math.isqrt(num_words))
    num_table = num_words // width * width
    words = _words(piece[: num_table * _WORD]).view(-1, width)
    rest = piece[num_table * _WORD :].to(torch.int64) + 1
    rows, columns = words.sum(1), words.sum(0)
    length = torch.full((), piece.numel(), dtype=torch.int64, device=piece.device)
    return torch.stack([length, _weighted(rows), _weighted(columns) ^ _weighted(rest)])


def _words(data: torch.Tensor) -> torch.Tensor:
    if data.storage_offset() % _WORD or data.data_ptr() % _WORD:
        data = data.clone()  # a view as int64 must be aligned
    return data.view(torch.int64)


def _weighted(values: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=values.device)
    return (values * (places * _SPREAD | 1)).sum()
