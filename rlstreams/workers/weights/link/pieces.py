"""Pieces that cross a link: runs of bytes with their place in the receiver, in sending order.

A piece is a run of elements of one parameter, contiguous in the receiver's memory, so that it is
received in place. Both ends cut a plan into the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BATCH_PIECES = 64
BATCH_BYTES = 2**30
SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + product(shape)) of parameter `name`, row-major.

    `place` is "parameter", or "load": a checkpoint's tensor, for the model's own loader.
    """

    place: str
    name: str
    dtype: str
    start: int
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.num_elements * SIZES[self.dtype]


def from_rows(rows: Sequence[Sequence[object]]) -> tuple[Piece, ...]:
    """Pieces from JSON: a list of each piece's fields."""
    return tuple(
        Piece(str(place), str(name), str(dtype), int(str(start)), tuple(shape))  # type: ignore[arg-type]
        for place, name, dtype, start, shape in rows
    )


def batches(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    """Runs of pieces that are broadcast together; empty pieces are left out."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if piece.num_elements == 0:
            continue
        if batch and (len(batch) == BATCH_PIECES or size + piece.num_bytes > BATCH_BYTES):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(piece)
        size += piece.num_bytes
    if batch:
        yield tuple(batch)
