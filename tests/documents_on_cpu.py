"""Documents and compiled layers on a CPU: its plain kernel, closed to the compiler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.engines import builtin_scorer
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
    """What the kernel computes, in plain operations."""
    borders = starts[: int(extent[0]) + 1].tolist()
    found = []
    for start, end in pairwise(borders):
        query, key, value = (
            t_ThD[start:end].transpose(0, 1) for t_ThD in (query_ThD, key_ThD, value_ThD)
        )
        seen_TT = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window >= 0:
            seen_TT = seen_TT.triu(-window)
        found_hTD = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen_TT, scale=scale, enable_gqa=True
        )
        found.append(found_hTD.transpose(0, 1))
    return torch.cat(found), None


@torch.library.custom_op("rlstreams_tests::attend", mutates_args=())
def _attend(
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    return one_by_one(query_ThD, key_ThD, value_ThD, starts, extent, scale, window)[0].clone()


@_attend.register_fake
def _(query_ThD: Tensor, *_more: Any) -> Tensor:
    return torch.empty_like(query_ThD)


def take_documents_on_cpu(replace: Callable[[object, str, object], object]) -> None:
    """Let scorers on the CPU pack and compile, as they would on a GPU.

    Args:
        replace: `setattr`, or a test's `monkeypatch.setattr`.
    """
    replace(bins, "_try_kernel", lambda _model, _device: None)
    replace(builtin_scorer, "take_documents", lambda scorer, _: bins.take_documents(scorer, "any"))
    replace(documents, "_fused", lambda *args: (_attend(*args), None))
