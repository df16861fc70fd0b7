"""Documents and compiled layers on a CPU: its plain kernel, closed to the compiler."""

from __future__ import annotations

from collections.abc import Callable
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


@torch.library.custom_op("rlstreams_tests::attend_backward", mutates_args=())
def _attend_backward(
    gradient_ThD: Tensor,
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # By hand: inside an operation there is no autograd.
    found = [torch.zeros_like(t_ThD) for t_ThD in (query_ThD, key_ThD, value_ThD)]
    heads = query_ThD.shape[1]
    for start, end in pairwise(starts[: int(extent[0]) + 1].tolist()):
        query, key, value, gradient = (
            t_ThD[start:end].transpose(0, 1).repeat_interleave(heads // t_ThD.shape[1], 0)
            for t_ThD in (query_ThD, key_ThD, value_ThD, gradient_ThD)
        )
        seen_TT = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window >= 0:
            seen_TT = seen_TT.triu(-window)
        scores_hTT = (query @ key.mT * scale).masked_fill(~seen_TT, -torch.inf)
        chances_hTT = scores_hTT.softmax(-1)
        product_hTT = chances_hTT * (gradient @ value.mT)
        inner_hTT = scale * (product_hTT - chances_hTT * product_hTT.sum(-1, keepdim=True))
        parts = (inner_hTT @ key, inner_hTT.mT @ query, chances_hTT.mT @ gradient)
        for into_ThD, part_hTD in zip(found, parts, strict=True):
            shared = part_hTD.unflatten(0, (into_ThD.shape[1], -1)).sum(1)
            into_ThD[start:end] = shared.transpose(0, 1)
    query, key, value = found
    return query, key, value


@_attend_backward.register_fake
def _(_gradient: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(t) for t in given[:3])
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient_ThD: Tensor) -> tuple[Tensor | None, ...]:
    given = (gradient_ThD, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*torch.ops.rlstreams_tests.attend_backward(*given), None, None, None, None)


_attend.register_autograd(_backward, setup_context=_keep)


def take_documents_on_cpu(replace: Callable[[object, str, object], object]) -> None:
    """Let the CPU pack and compile, as a GPU would.

    Args:
        replace: `setattr`, or a test's `monkeypatch.setattr`.
    """
    replace(bins, "CPU", "none")
    replace(bins, "_try_kernel", lambda _model, _device: None)
    replace(documents, "_fused", lambda *args: (_attend(*args), None))
