"""A checksum of bytes as they lie in memory, which a GPU computes beside a transfer.

A piece is seen as a near-square table of int64; the sums of its rows and of its columns, weighted
by odd numbers that differ by position, are added modulo 2^64. Two reads of the data, no large
intermediate, and sums of integers do not depend on order: the CPU gets the same number. It finds
flipped, missing, stale and misplaced bytes; it is no protection against an adversary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import lru_cache

import torch

_SPREAD = -7046029254386353131  # 2^64 / golden ratio, odd
_WORD = 8  # bytes
_SMALL_BYTES = 4 * 2**20  # smaller pieces are summed together: a kernel costs more than their bytes


class Checksum:
    """A checksum over batches of pieces, in sending order."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._sums: list[torch.Tensor] = []

    def add(self, pieces: Sequence[torch.Tensor]) -> None:
        """Add a batch, each piece flat uint8, on any device; runs on the current stream."""
        small = [piece for piece in pieces if piece.numel() < _SMALL_BYTES]
        large = [piece for piece in pieces if piece.numel() >= _SMALL_BYTES]
        for piece in [*large, *([torch.cat(small)] if small else [])]:
            self._lengths.append(piece.numel())
            self._sums += _sums(piece)

    def hexdigest(self) -> str:
        """The checksum, 16 hexadecimal digits; waits for the device."""
        digest = hashlib.sha256(json.dumps(self._lengths).encode())
        if self._sums:
            numbers = torch.stack(self._sums).cpu().numpy().astype("<i8")
            digest.update(numbers.tobytes())
        return digest.hexdigest()[:16]


def _sums(piece: torch.Tensor) -> list[torch.Tensor]:
    """Sums of rows, of columns, and of the few bytes behind the table; int64 scalars."""
    num_words = piece.numel() // _WORD
    width = max(1, math.isqrt(num_words))
    num_bytes = num_words // width * width * _WORD
    sums = []
    if num_bytes:
        words = _words(piece[:num_bytes]).view(-1, width)
        sums = [_weighted(words.sum(1)), _weighted(words.sum(0))]
    if num_bytes < piece.numel():
        sums.append(_weighted(piece[num_bytes:].to(torch.int64)))
    return sums


def _words(data: torch.Tensor) -> torch.Tensor:
    if data.storage_offset() % _WORD or data.data_ptr() % _WORD:
        data = data.clone()  # a view as int64 must be aligned
    return data.view(torch.int64)


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * _weights(values.numel(), values.device)).sum()


@lru_cache(maxsize=256)
def _weights(num: int, device: torch.device) -> torch.Tensor:
    weights = torch.arange(1, num + 1, dtype=torch.int64, device=device) * _SPREAD | 1
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams will read it
    return weights
