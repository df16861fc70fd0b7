"""SGLang: the function named by `--custom-weight-loader rlstreams_server.sglang.receive`.

The server's route `/update_weights_from_tensor` calls it in each scheduler process with the model
and a list of (name, tensor); the name of the first is the order, the tensor is empty.
"""

from __future__ import annotations

from typing import Any

import torch

from .model_target import Loading
from .orders import ServerRank

_servers: dict[int, ServerRank] = {}


def receive(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:  # noqa: ANN401
    """Obey the order; never raises, because that would end the server."""
    for text, _ in named_tensors:
        if text.startswith("{"):
            _server(model).obey(text)


def _server(model: Any) -> ServerRank:  # noqa: ANN401
    if id(model) not in _servers:
        rank, ranks = _tensor_parallel()
        device = next(model.parameters()).device
        _servers[id(model)] = ServerRank(
            model,
            device,
            engine=f"sglang {_version()}",
            rank=rank,
            ranks=ranks,
            # Source: `load_weights` of its Qwen3-MoE, which takes experts one by one, passes over
            # what it does not know, and returns nothing.
            loading=Loading(packs_again=False, takes_fused_experts=False, names_filled=False),
        )
    return _servers[id(model)]


def _version() -> str:
    from sglang.version import __version__

    return str(__version__)


def _tensor_parallel() -> tuple[int, int]:
    try:
        from sglang.srt.distributed import (
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )
    except ImportError:
        return 0, 1
    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
