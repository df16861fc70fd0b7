"""Layers whose activations are computed again in the backward instead of being held.

The library's own switch works only in train mode, which would turn dropout on: the policy that
learns must be the one that sampled. So each layer that the library marks as fit for it is wrapped
here. A recomputation has the same inputs and draws no numbers, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.one_order import computed_again


def recompute_activations(model: nn.Module) -> int:
    """Wrap the layers of a model of the library; returns their number.

    Raises:
        EngineError: the library marks no layer.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    recompute_layers(layers)
    if not layers:
        raise EngineError(
            f"trainer.activation_checkpointing is set, but a {type(model).__name__} has no layer "
            "that its library marks for it: set it to false"
        )
    return len(layers)


def recompute_layers(layers: Sequence[nn.Module]) -> None:
    """Wrap these layers."""
    for layer in layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=computed_again,
        )
