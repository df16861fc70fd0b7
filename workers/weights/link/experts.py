"""Stacked experts one by one, as model folders and some loaders have them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def each_expert(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and views: an expert's matrices under the names of model folders, the rest as it is.

    `mlp.experts.gate_up_proj` (experts, 2 x width, hidden) holds gate above up;
    `mlp.experts.down_proj` is (experts, hidden, width).
    """
    for name, tensor in tensors:
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts") or leaf not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            if leaf == "down_proj":
                yield f"{stem}.{expert}.down_proj.weight", matrix
                continue
            gate, up = matrix.chunk(2)
            yield f"{stem}.{expert}.gate_proj.weight", gate
            yield f"{stem}.{expert}.up_proj.weight", up
