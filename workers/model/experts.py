"""Which experts the router chose: capture by forward hooks, without patching the model.

Routers of transformers 5 (`...mlp.gate`) return logits (N, E), scores (N, K) and indices (N, K), in
this order or another, for N = batch x time rows in row-major order; a layer calls its router once
per forward. Axes: `B` sequence, `T` token, `L` layer with experts, `K` experts per token.
"""

from __future__ import annotations

from typing import Any

import torch

# Ends of the names of their classes: most families', AFMoE's, HunYuan's.
_ROUTERS = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "MoEV1Gate")


def routers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers in layer order; empty for a dense model."""
    return [m for m in model.modules() if type(m).__name__.endswith(_ROUTERS)]


def chosen_of(output: Any) -> torch.Tensor:  # noqa: ANN401  (of an untyped library)
    """The indices among a router's outputs: Granite's come first, most come last."""
    indices: torch.Tensor
    (indices,) = [part for part in output if not part.is_floating_point()]
    return indices


class RouterCapture:
    """Records the experts of each forward while it is attached."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._routers = routers_of(model)
        self._rows: list[torch.Tensor] = []
        self._hooks = [router.register_forward_hook(self._record) for router in self._routers]

    @property
    def num_layers(self) -> int:
        """Layers that have a router."""
        return len(self._routers)

    def _record(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        self._rows.append(chosen_of(output))

    def take(self, batch: int) -> torch.Tensor:
        """The experts of the last forward, (B, T, L, K) int64; forgets them."""
        assert len(self._rows) == len(self._routers), "take() follows every forward"
        stacked_NLK = torch.stack(self._rows, 1)
        self._rows = []
        return stacked_NLK.reshape(batch, -1, *stacked_NLK.shape[1:])

    def close(self) -> None:
        """Detach the hooks; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def expert_dtype(num_experts: int) -> torch.dtype:
    """The narrowest dtype of the wire that holds an expert's index."""
    return torch.uint8 if num_experts <= 256 else torch.uint16
