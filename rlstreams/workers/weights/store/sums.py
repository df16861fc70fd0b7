"""Sums of a version's pieces, carried from version to version: a delta names what changes in them.

A version's hash is made of two sums over the words of each tensor (`link/weight_hash.py`), so the
sums of an unchanged piece are those of the version before, and where few words changed, what these
add is exchanged. The log's hash decides whether the result is right. It says nothing about memory
that was overwritten after its own check: for this, a third sum is taken of all bytes at each
version. It is quick, and any single flipped bit changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlstreams.workers.weights.store.delta import PIECE_WORDS, Changed, Words, pieces_of

if TYPE_CHECKING:
    import torch

_LANE_BYTES = 8
_BELOW = 1 << 64


class PieceSums(NamedTuple):
    """Modulo 2^64."""

    first: int  # both sums of the hash
    second: int
    lanes: int  # of the bytes as unsigned words of 8


Sums: TypeAlias = dict[str, list[PieceSums | None]]  # of each piece, by tensor; None: not known


class OverwrittenError(ValueError):
    """Words that no delta names are not what they were; names the tensor."""


def after(known: PieceSums, changed: Changed, words: Words, number: int) -> PieceSums:
    """The sums of piece `number` of a tensor once words of it were changed."""
    import torch

    from rlstreams.workers.weights.link.weight_hash import on_host, sums_at

    if not len(changed.places):
        return known
    new = words[changed.places]
    places = torch.from_numpy(changed.places + number * PIECE_WORDS)
    one, other = on_host([sums_at(torch.from_numpy(w), places) for w in (changed.old, new)])
    bits = (changed.places * words.itemsize % _LANE_BYTES * 8).astype(np.uint64)
    lanes = int((_lanes_at(new, bits) - _lanes_at(changed.old, bits)).sum())
    return PieceSums(
        (known.first + other[0] - one[0]) % _BELOW,
        (known.second + other[1] - one[1]) % _BELOW,
        (known.lanes + lanes) % _BELOW,
    )


def complete(tensors: Mapping[str, torch.Tensor], sums: Sums) -> str:
    """Compute the sums that are not known, and check the others; the version's hash.

    Raises:
        OverwrittenError: a known sum is not that of the bytes.
    """
    import torch

    from rlstreams.workers.weights.link.weight_hash import hash_of_sums, on_host, sums_of

    whole = {}
    for name, tensor in tensors.items():
        found = sums.setdefault(name, [])
        pieces = pieces_of(tensor)
        found += [None] * (len(pieces) - len(found))
        for number, words in enumerate(pieces):
            lanes, known = _lanes(words), found[number]
            if known is None:
                both = on_host([sums_of(torch.from_numpy(words), number * PIECE_WORDS)])[0]
                found[number] = PieceSums(both[0] % _BELOW, both[1] % _BELOW, lanes)
            elif known.lanes != lanes:
                raise OverwrittenError(name)
        totals = [sum(column) % _BELOW for column in list(zip(*found, strict=True))[:2]] or [0, 0]
        whole[name] = torch.from_numpy(np.array(totals, np.uint64).view(np.int64))
    return hash_of_sums(tensors, whole)


def _lanes(words: Words) -> int:
    whole = words.nbytes // _LANE_BYTES * _LANE_BYTES
    content = words.view(np.uint8)
    rest = int.from_bytes(content[whole:].tobytes(), "little")
    return (int(content[:whole].view("<u8").sum(dtype=np.uint64)) + rest) % _BELOW


def _lanes_at(words: Words, bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return words.view(f"<u{words.itemsize}").astype(np.uint64) << bits
