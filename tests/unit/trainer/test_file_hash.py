"""A file's hash is the documented one, whatever thread read which piece."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from rlstreams.workers.trainer.training.file_hash import PIECE_BYTES, file_hash


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_each_piece_counts_by_its_own_digest(size: int, tmp_path: Path) -> None:
    """An empty file has no piece; the last one may be short."""
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    path = tmp_path / "file"
    path.write_bytes(content)
    pieces = [content[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces))
    assert file_hash(path) == expected.hexdigest()
