"""A CPU's kernels for attention by documents; all else is the product's, for the compiler too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    keys: Tensor | None = None,
    key_starts: Tensor | None = None,
    own: Tensor | None = None,
    tree: Tensor | None = None,
) -> tuple[Tensor, None]:
    """What is computed, in plain operations that autograd knows and no compiler takes."""
    starts = key_rows = starts[: int(extent[0]) + 1]
    if keys is not None and key_starts is not None and tree is not None:
        key_rows = key_starts[: len(starts)]
        places = keys[: int(tree[0, 0])].long()
        key_ThD, value_ThD = key_ThD[places], value_ThD[places]
    found = [torch.empty_like(query_ThD[:0])]
    for queries, seen, unseen_TK in _documents(starts, key_rows, window):
        given = query_ThD[queries], key_ThD[seen], value_ThD[seen]
        query, key, value = (t_ThD.transpose(0, 1) for t_ThD in given)
        found_hTD = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=~unseen_TK, scale=scale, enable_gqa=True
        )
        found.append(found_hTD.transpose(0, 1))
    return torch.cat(found), None


def _documents(
    starts: Tensor, key_starts: Tensor, window: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries and keys of each, and which of the keys a query does not see: the last sees all."""
    for own, all_ in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        num, before = own[1] - own[0], (all_[1] - all_[0]) - (own[1] - own[0])
        seen_TK = torch.ones(num, before + num, dtype=torch.bool).tril(before)
        seen_TK = seen_TK if window < 0 else seen_TK.triu(before - window)
        yield slice(*own), slice(*all_), ~seen_TK


def _kernel(
    query_ThD: Tensor,
    key_KhD: Tensor,
    value_KhD: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    _longest: Sequence[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    extent = torch.tensor([len(starts) - 1])
    keys, tree = torch.arange(len(key_KhD)), torch.tensor([[len(key_KhD)]])
    given = query_ThD, key_KhD, value_KhD, starts, extent, scale, window
    found_ThD, _ = one_by_one(*given, keys, key_starts, None, tree)
    return found_ThD, torch.zeros(query_ThD.shape[1::-1])


def _kernel_backward(
    gradient_ThD: Tensor,
    query_ThD: Tensor,
    key_KhD: Tensor,
    value_KhD: Tensor,
    _output_ThD: Tensor,
    _log_sums_hT: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    _longest: Sequence[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # By hand: inside an operation there is no autograd.
    given, heads = (query_ThD, key_KhD, value_KhD), query_ThD.shape[1]
    found = [torch.zeros_like(t_ThD) for t_ThD in given]
    for queries, seen, unseen_TK in _documents(starts, key_starts, window):
        rows = (queries, seen, seen, queries)
        query, key, value, gradient = (
            t_ThD[own].transpose(0, 1).repeat_interleave(heads // t_ThD.shape[1], 0)
            for own, t_ThD in zip(rows, (*given, gradient_ThD), strict=True)
        )
        chances_hTK = (query @ key.mT * scale).masked_fill(unseen_TK, -torch.inf).softmax(-1)
        product_hTK = chances_hTK * (gradient @ value.mT)
        inner_hTK = scale * (product_hTK - chances_hTK * product_hTK.sum(-1, keepdim=True))
        parts = (inner_hTK @ key, inner_hTK.mT @ query, chances_hTK.mT @ gradient)
        for own, into_ThD, part_hTD in zip(rows, found, parts, strict=False):
            shared_hTD = part_hTD.unflatten(0, (into_ThD.shape[1], -1)).sum(1)
            into_ThD[own] = shared_hTD.transpose(0, 1)
    query, key, value = found
    return query, key, value


def _where_it_lies(on_gpu: Callable[..., Any], on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(first: Tensor, *more: Any) -> Any:
        return (on_gpu if first.is_cuda else on_cpu)(first, *more)

    return kernel


_: Any = documents
_._kernel = _where_it_lies(documents._kernel, _kernel)
_._kernel_backward = _where_it_lies(documents._kernel_backward, _kernel_backward)


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
