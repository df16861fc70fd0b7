"""A CPU's kernels for attention by documents; all else is the product's, for the compiler too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.model import bins, documents


def one_by_one(
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, None]:
    """What the kernel computes, in plain operations that autograd knows and no compiler takes."""
    found = []
    for start, end, unseen_TT in _documents(starts, extent, window):
        query, key, value = (
            t_ThD[start:end].transpose(0, 1) for t_ThD in (query_ThD, key_ThD, value_ThD)
        )
        found_hTD = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=~unseen_TT, scale=scale, enable_gqa=True
        )
        found.append(found_hTD.transpose(0, 1))
    return torch.cat(found), None


def _documents(starts: Tensor, extent: Tensor, window: int) -> Iterator[tuple[int, int, Tensor]]:
    for start, end in pairwise(starts[: int(extent[0]) + 1].tolist()):
        seen_TT = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        yield start, end, ~(seen_TT if window < 0 else seen_TT.triu(-window))


@documents._fused.register_kernel("cpu")
def _(query_ThD: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return one_by_one(query_ThD, *more)[0], torch.zeros(query_ThD.shape[1::-1])


@documents._fused_backward.register_kernel("cpu")
def _(
    gradient_ThD: Tensor,
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    _output_ThD: Tensor,
    _log_sums_hT: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # By hand: inside an operation there is no autograd.
    given, heads = (query_ThD, key_ThD, value_ThD), query_ThD.shape[1]
    found = [torch.zeros_like(t_ThD) for t_ThD in given]
    for start, end, unseen_TT in _documents(starts, extent, window):
        query, key, value, gradient = (
            t_ThD[start:end].transpose(0, 1).repeat_interleave(heads // t_ThD.shape[1], 0)
            for t_ThD in (*given, gradient_ThD)
        )
        chances_hTT = (query @ key.mT * scale).masked_fill(unseen_TT, -torch.inf).softmax(-1)
        product_hTT = chances_hTT * (gradient @ value.mT)
        inner_hTT = scale * (product_hTT - chances_hTT * product_hTT.sum(-1, keepdim=True))
        parts = (inner_hTT @ key, inner_hTT.mT @ query, chances_hTT.mT @ gradient)
        for into_ThD, part_hTD in zip(found, parts, strict=True):
            shared_hTD = part_hTD.unflatten(0, (into_ThD.shape[1], -1)).sum(1)
            into_ThD[start:end] = shared_hTD.transpose(0, 1)
    query, key, value = found
    return query, key, value


def take_documents_on_cpu(
    replace: Callable[[object, str, object], object], compiler: str = "aot_eager"
) -> None:
    """Let the CPU pack and trace layers, as a GPU would.

    What was traced is computed operation by operation: to compile it to C++ takes half a minute,
    and gives kernels that are no GPU's.

    Args:
        replace: `setattr`, or a test's `monkeypatch.setattr`.
        compiler: "inductor": compile it.
    """
    replace(bins, "CPU", "none")
    replace(torch, "compile", partial(torch.compile, backend=compiler))
