"""Words of a tensor as the difference to older ones: lossless, and small if little changed.

Elements are read as signed words of their size. A difference is taken modulo the word and folded
to an unsigned number whose high bytes are zero when it is small (zigzag, as in Protocol Buffers).
If few words differ, their gaps and differences are kept, else all differences; both by bytes of
equal weight (planes), and compressed. Form and library were chosen by measurement: decision
0083.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Words: TypeAlias = NDArray[np.signedinteger]

WHOLE, DENSE, SPARSE = 0, 1, 2  # forms: the words; all differences; those that are not 0
PIECE_WORDS = 1 << 22  # encoded at once: several threads work on pieces of one tensor
_SPARSE_BELOW = 0.25  # share of words that differ: above, the gaps cost more time than they save
_LEVEL = 1  # of zstd: higher ones are slower, and no smaller on differences
_GAP = np.dtype("<u4")


class DeltaError(ValueError):
    """Bytes that are no encoded piece of these words; names the defect."""


def pieces_of(tensor: torch.Tensor) -> list[Words]:
    """Views of a contiguous tensor's words."""
    import torch

    size = tensor.element_size()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().view(f"<i{size}")
    return [flat[at : at + PIECE_WORDS] for at in range(0, len(flat), PIECE_WORDS)]


def encode(words: Words, base: Words | None) -> tuple[int, bytes]:
    """Form and bytes of a piece.

    Args:
        words: at most `PIECE_WORDS`.
        base: as many words of the same size; None: encode the words themselves.
    """
    if base is None:
        return WHOLE, _compressed(_planes(words))
    folded = _folded(words - base)
    if np.count_nonzero(folded) > _SPARSE_BELOW * len(words):
        return DENSE, _compressed(_planes(folded))
    places = np.flatnonzero(folded)
    gaps = np.diff(places, prepend=-1).astype(_GAP)
    return SPARSE, _compressed(_planes(gaps) + _planes(folded[places]))


class Changed(NamedTuple):
    """The words of a piece that were changed: their places in it, and what was there."""

    places: NDArray[np.int64]
    old: Words


def apply(form: int, data: bytes, words: Words) -> Changed | None:
    """Turn the base's words into the encoded ones, in place; None: any may have changed.

    Raises:
        DeltaError: the bytes are damaged, or of other words.
    """
    content = _decompressed(data, len(words) * (words.itemsize + _GAP.itemsize))
    size = words.itemsize
    if form == WHOLE:
        words[:] = _from_planes(content, words.dtype, len(words))
    elif form == DENSE:
        words += _unfolded(_from_planes(content, _unsigned(words), len(words)))
    elif form == SPARSE:
        num, rest = divmod(len(content), _GAP.itemsize + size)
        if rest:
            raise DeltaError(f"{len(content):,} bytes are no gaps and differences")
        border = num * _GAP.itemsize
        places = np.cumsum(_from_planes(content[:border], _GAP, num), dtype=np.int64) - 1
        if num and not 0 <= places[0] <= places[-1] < len(words):
            raise DeltaError(f"it changes word {places[-1]:,} of {len(words):,}")
        changed = Changed(places, words[places])
        words[places] += _unfolded(_from_planes(content[border:], _unsigned(words), num))
        return changed
    else:
        raise DeltaError(f"form {form} is of a newer release")
    return None


def _folded(difference: Words) -> NDArray[np.unsignedinteger]:
    """Fold 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    sign = difference >> (8 * difference.itemsize - 1)
    return ((difference << 1) ^ sign).view(_unsigned(difference))


def _unfolded(folded: NDArray[np.integer]) -> Words:
    words: Words = folded.view(f"<i{folded.itemsize}")
    lowest = words & words.dtype.type(1)
    half: Words = (folded >> folded.dtype.type(1)).view(words.dtype)
    return half ^ -lowest


def _unsigned(words: Words) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{words.itemsize}")


def _planes(words: NDArray[np.integer]) -> bytes:
    """Bytes by plane: the lowest bytes of all words, then the next ones, and so on."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _from_planes(content: bytes, dtype: np.dtype[np.integer], num: int) -> NDArray[np.integer]:
    if len(content) != num * dtype.itemsize:
        raise DeltaError(f"{len(content):,} bytes are not {num:,} words of {dtype.itemsize}")
    planes = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, num)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(num)


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(content)


def _decompressed(data: bytes, limit: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) > limit:
            raise DeltaError(f"it claims more than {limit:,} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as err:
        raise DeltaError(f"it cannot be decompressed: {err}") from err
