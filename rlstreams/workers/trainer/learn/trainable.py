"""The trained parameters: all weights of a model, or low-rank adapters.

Pullers see no difference: adapters are merged into the published weights, under the same names and
shapes. A checkpoint holds the merged weights, the optimizer's state and the adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.trainer import LoraSection
from rlstreams.workers.model.model import weights_of
from rlstreams.workers.trainer.learn.dither import Dither, rounded, seed_of
from rlstreams.workers.weights.layout import weight_hash

VALUE = "value"  # of an adapter among the optimizer's tensors
ARRIVED = "adapter_arrived"


class Trainable(Protocol):
    """The part of a model that a step changes."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimizer changes, by name."""

    def weights(self) -> dict[str, Tensor]:
        """The whole model as it is published, in name order; copies only where needed."""

    def extra(self) -> frozenset[str]:
        """Names of `parameters` that a checkpoint needs beside the weights."""


class AllWeights:
    """Every parameter learns."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.requires_grad_(True)

    def parameters(self) -> dict[str, nn.Parameter]:
        """See `Trainable`."""
        return dict(self._model.named_parameters())

    def weights(self) -> dict[str, Tensor]:
        """The model's own tensors: the next step changes them."""
        return weights_of(self._model)

    def extra(self) -> frozenset[str]:
        """None: the weights are all."""
        return frozenset()


class _LowRank(nn.Module):
    """W + scale x B A, B of zeros at first. Source: LoRA, https://arxiv.org/abs/2106.09685."""

    def __init__(self, name: str, weight: Tensor, section: LoraSection) -> None:
        super().__init__()
        num_out, num_in = weight.shape
        # Keyed by the layer, so that no adapter depends on the others.
        own = torch.Generator().manual_seed(seed_of(name))
        draw = torch.randn(section.rank, num_in, generator=own)
        # float32 even for 16-bit weights: an update is too small for 16 bits.
        self.down = nn.Parameter((draw / num_in**0.5).to(weight.device))
        self.up = nn.Parameter(torch.zeros(num_out, section.rank, device=weight.device))
        self._scale = section.alpha / section.rank
        dither = Dither.of(name, weight.shape, weight.device)
        self.register_buffer("_rows_O", dither.rows_O, persistent=False)
        self.register_buffer("_columns_I", dither.columns_I, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The merged weight, bit for bit as it is published."""
        dither = Dither(*self.buffers())
        merge: Any = _Merged.apply
        found: Tensor = merge(weight, self.down, self.up, self._scale, dither)
        return found


class _Merged(torch.autograd.Function):
    """`merged`, with the gradient of the sum without rounding."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        weight: Tensor,
        down: Tensor,
        up: Tensor,
        scale: float,
        dither: Dither,
    ) -> Tensor:
        ctx.save_for_backward(down, up)
        ctx.scale = scale
        return merged(weight, down, up, scale, dither)

    @staticmethod
    def backward(ctx: Any, gradient_OI: Tensor) -> Any:  # noqa: ANN401
        down, up = ctx.saved_tensors
        scaled_OI = ctx.scale * gradient_OI.float()
        return None, up.T @ scaled_OI, scaled_OI @ down.T, None, None


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float, dither: Dither) -> Tensor:
    """Weight of a layer with an adapter: the sum in float32, rounded without a dead zone where the
    weight has 16 bits. No gradient."""
    whole = (up @ down).mul_(scale).add_(weight)
    return rounded(whole, dither) if weight.dtype == torch.bfloat16 else whole


def arrived(
    weight: Tensor, made: Tensor, down: Tensor, up: Tensor, scale: float
) -> tuple[float, float]:
    """Share of an adapter's change D in the merged weight: (made - weight) . D, and D . D."""
    whole = (up @ down).mul_(scale)
    moved = made.float() - weight.float()
    return float((moved * whole).sum(dtype=torch.float64)), float(
        whole.square().sum(dtype=torch.float64)
    )


def share_arrived(sums: Iterable[tuple[float, float]]) -> dict[str, float]:
    """The metric over all adapters, from the sums of `arrived`; empty before they have changed."""
    found = list(sums)
    whole = sum(square for _, square in found)
    return {ARRIVED: sum(moved for moved, _ in found) / whole} if whole else {}


class Adapters:
    """Only adapters of linear layers learn; the folder's weights stay as they are."""

    def __init__(self, model: nn.Module, section: LoraSection) -> None:
        """Put adapters on every layer whose name `section.targets` finds; the output stays the
        same.

        Raises:
            ConfigError: there is no such layer.
        """
        model.requires_grad_(False)
        self._base = weights_of(model)
        output = getattr(model, "get_output_embeddings", lambda: None)()
        layers = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear
            and module is not output
            and re.search(section.targets, name)
        }
        if not layers:
            raise ConfigError(f"trainer.lora.targets {section.targets!r} is no linear layer's name")
        self._adapted: dict[str, _LowRank] = {}
        for name, layer in layers.items():
            low_rank = _LowRank(name, layer.weight, section)
            parametrize.register_parametrization(layer, "weight", low_rank)
            self._adapted[f"{name}.weight"] = low_rank

    def parameters(self) -> dict[str, nn.Parameter]:
        """Two parameters for each layer."""
        return {
            f"{name}.{half}": getattr(low_rank, half)
            for name, low_rank in self._adapted.items()
            for half in ("down", "up")
        }

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The folder's weights, with adapters merged into copies of those that have some."""
        return {name: self._merged(name, base) for name, base in self._base.items()}

    def extra(self) -> frozenset[str]:
        """Names of all adapters."""
        return frozenset(self.parameters())

    def _merged(self, name: str, base: Tensor) -> Tensor:
        if name not in self._adapted:
            return base
        low_rank = self._adapted[name]
        # Adding zero would turn a weight of -0.0 into 0.0, which has another hash.
        return low_rank.forward(base) if bool(low_rank.up.any()) else base


NOT_OF_FOLDER = "the checkpoint's weights are not this folder's with adapters"


def check_base(base: Iterable[tuple[str, Tensor]], weights: Mapping[str, Tensor]) -> None:
    """Check that weights without an adapter are the folder's.

    Raises:
        ValueError: one is not.
    """
    for name, tensor in base:
        if not is_same(tensor, weights[name]):
            raise ValueError(f"{NOT_OF_FOLDER}: {name} differs")


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether bits, shape and dtype are the same, on any devices."""
    return weight_hash({"": one}) == weight_hash({"": other})


def trainable_of(model: nn.Module, section: LoraSection) -> Trainable:
    """All weights, or adapters, as the configuration asks."""
    return Adapters(model, section) if section.rank else AllWeights(model)


def sorted_state(
    optimizer_tensors: Mapping[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The optimizer's tensors by parameter and part, and the adapters' values.

    Raises:
        ValueError: a tensor is of none of these parameters.
    """
    states: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in optimizer_tensors.items():
        name, _, part = key.rpartition(":")
        if name not in states:
            raise ValueError(
                f"optimizer state names an unknown parameter: {key!r}; it is of another "
                "model, or was written under another trainer.lora"
            )
        states[name][part] = tensor
    return states, {name: own.pop(VALUE) for name, own in states.items() if VALUE in own}
