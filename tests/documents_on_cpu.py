"""Documents and compiled layers on a CPU: its plain kernel, closed to the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.engines import builtin_scorer
from rlstreams.workers.model import bins, documents

_plain = documents._one_by_one


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
    return _plain(query_ThD, key_ThD, value_ThD, starts, extent, scale, window)[0].clone()


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
    replace(documents, "_one_by_one", lambda *args: (_attend(*args),))
