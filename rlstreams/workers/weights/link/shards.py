"""Shard of a parameter that a server's rank holds, read off the shapes. Pure.

Column-parallel layers split rows, row-parallel ones the last axis; fused ones split each part;
fewer key-value heads than ranks are repeated; experts are split inside (tensor parallel) or dealt
out in runs (expert parallel, linear placement); a vocabulary may be padded behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VOCABULARY_PADDING = 64  # rows, of vLLM and SGLang
_VOCABULARY = frozenset(
    {"embed_tokens", "lm_head", "embed_in", "embed_out", "wte", "word_embeddings"}
)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece as the sender makes it: a tensor, seen as `view`, cut to [start, start + n) of an
    axis. `shape` is that of the result."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...] = ()  # empty: the tensor's own shape
    axis: int = 0
    start: int = 0

    @property
    def module(self) -> str:
        """Name of the tensor's module, without those around it."""
        return self.name.rpartition(".")[0].rpartition(".")[2]

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of its tensor: a view."""
        if not self.view:
            return tensor
        return tensor.view(self.view).narrow(self.axis, self.start, self.shape[self.axis])


def parts_of(
    names: Sequence[str], held: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[Part, ...]:
    """The whole tensors of these names, as parts."""
    return tuple(Part(name, tuple(held[name][1])) for name in names)


def split(
    whole: Sequence[Part], shape: tuple[int, ...], rank: int, ranks: int
) -> tuple[Part, ...] | None:
    """Parts that fill a parameter of `shape` on `rank`; None if no rule gives them."""
    rows = sum(part.shape[0] if part.shape else 1 for part in whole)
    tail = whole[0].shape[1:]
    if any(part.shape[1:] != tail for part in whole):
        return None
    if (rows, *tail) == shape or (len(whole) == 1 and whole[0].shape == shape):
        return tuple(whole)
    if not shape or len(shape) != len(whole[0].shape):
        return None
    if shape[1:] == tail:
        return _rows(whole, shape[0], rank, ranks)
    if len(whole) == 1 and ranks > 1:
        return _inner(whole[0], shape, rank, ranks)
    return None


def _cut(part: Part, view: tuple[int, ...], axis: int, start: int, length: int) -> Part:
    shape = (*view[:axis], length, *view[axis + 1 :])
    return Part(part.name, shape, view, axis, start)


def _rows(whole: Sequence[Part], rows: int, rank: int, ranks: int) -> tuple[Part, ...] | None:
    """Split by rows, each part for itself."""
    counts = [part.shape[0] for part in whole]
    if whole[0].module in _VOCABULARY and 0 < rows * ranks - counts[0] < VOCABULARY_PADDING * ranks:
        return _padded(whole[0], rows, rank)
    local = _local_rows(counts, rows, ranks)
    if local is None:
        return None
    cuts = []
    for part, count, length in zip(whole, counts, local, strict=True):
        copies = length * ranks // count  # 1, or the number of ranks that share a key-value head
        cuts.append(_cut(part, part.shape, 0, rank // copies * length, length))
    return tuple(cuts)


def _local_rows(counts: Sequence[int], rows: int, ranks: int) -> list[int] | None:
    if ranks > 1 and sum(counts) == rows * ranks and all(c % ranks == 0 for c in counts):
        return [count // ranks for count in counts]
    if ranks > 1 and len(counts) == 3 and counts[0] % ranks == 0 and counts[1] == counts[2]:
        heads, odd = divmod(rows - counts[0] // ranks, 2)
        if not odd and heads > 0 and heads * ranks % counts[1] == 0 and counts[1] % heads == 0:
            return [counts[0] // ranks, heads, heads]
    return None


def _padded(part: Part, rows: int, rank: int) -> tuple[Part, ...]:
    start = min(rank * rows, part.shape[0])
    return (_cut(part, part.shape, 0, start, min(rows, part.shape[0] - start)),)


def _inner(part: Part, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[Part, ...] | None:
    """Split along a later axis."""
    full = part.shape
    if shape[:-1] == full[:-1] and shape[-1] * ranks == full[-1]:
        return (_cut(part, full, len(full) - 1, rank * shape[-1], shape[-1]),)
    is_gate_up = len(full) == 3 and (shape[0], shape[2]) == (full[0], full[2])
    if is_gate_up and shape[1] * ranks == full[1] and shape[1] % 2 == 0:
        view = (full[0], 2, full[1] // 2, full[2])
        return (_cut(part, view, 2, rank * shape[1] // 2, shape[1] // 2),)
    return None
