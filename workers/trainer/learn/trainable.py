"""The trained parameters: all weights of a model, or low-rank adapters.

Pullers see no difference: adapters are merged into the published weights, under the same names and
shapes. A checkpoint holds the merged weights, the optimizer's state and the adapters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rlstreams.workers.config.trainer import LoraSection
from rlstreams.workers.model.model import load_weights, weights_of
from rlstreams.workers.weights.layout import layout_of, weight_hash

VALUE = "value"  # of an adapter among the optimizer's tensors
EPS32 = torch.finfo(torch.float32).eps


class Trainable(Protocol):
    """A model's share in a step."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer changes, by name."""

    def weights(self) -> dict[str, Tensor]:
        """The whole model as it is published, in name order; not copies where none are needed."""

    def extra(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the weights, by the names of `parameters`."""

    def load(self, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        """Take what `weights` and `extra` gave.

        Raises:
            WeightError: the weights are not this model's.
            ValueError: `extra` is not what they need; nothing is loaded.
        """


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

    def extra(self) -> dict[str, Tensor]:
        """Nothing: the weights are all."""
        return {}

    def load(self, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        """See `Trainable`."""
        if extra:
            raise ValueError(
                f"optimizer state holds adapters, first {min(extra)}: see trainer.lora"
            )
        load_weights(self._model, weights)


class _LowRank(nn.Module):
    """W + scale x B A, B of zeros at first. Source: LoRA, https://arxiv.org/abs/2106.09685."""

    def __init__(self, name: str, weight: Tensor, section: LoraSection) -> None:
        super().__init__()
        num_out, num_in = weight.shape
        # Keyed by the layer, so that no adapter depends on which others there are.
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        draw = torch.randn(section.rank, num_in, generator=torch.Generator().manual_seed(seed))
        # In float32 whatever the weight has: an update is smaller than 16 bits can tell.
        self.down = nn.Parameter((draw / num_in**0.5).to(weight.device))
        self.up = nn.Parameter(torch.zeros(num_out, section.rank, device=weight.device))
        self._scale = section.alpha / section.rank

    def forward(self, weight: Tensor) -> Tensor:
        """The merged weight; what is published is this, to the bit."""
        return merged(weight, self.down, self.up, self._scale)

    def rounding(self, weight: Tensor) -> Tensor:
        """See `rounding`."""
        return rounding(weight, self.down, self.up, self._scale)


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """What a layer with an adapter computes with."""
    return weight + (scale * (up @ down)).to(weight.dtype)


def rounding(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """How far the merged weight of other hardware, which adds in another order, may be off."""
    size = weight.float().abs() + scale * (up.abs() @ down.abs())
    return size * (2 * torch.finfo(weight.dtype).eps + len(down) * EPS32)


class Adapters:
    """Only adapters of linear layers learn; the folder's weights stay as they are."""

    def __init__(self, model: nn.Module, section: LoraSection) -> None:
        """Put adapters on every layer whose name `section.targets` finds; the output stays as is.

        Raises:
            ValueError: there is no such layer.
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
            raise ValueError(f"trainer.lora.targets {section.targets!r} is no linear layer's name")
        self._adapted: dict[str, _LowRank] = {}
        for name, layer in layers.items():
            low_rank = _LowRank(name, layer.weight, section)
            parametrize.register_parametrization(layer, "weight", low_rank)
            self._adapted[f"{name}.weight"] = low_rank
        self._loaded: dict[str, Tensor] = {}  # adapters of a checkpoint ...
        self._published: dict[str, Tensor] = {}  # ... and what other hardware merged of them

    def parameters(self) -> dict[str, nn.Parameter]:
        """Two a layer."""
        return {
            f"{name}.{half}": getattr(low_rank, half)
            for name, low_rank in self._adapted.items()
            for half in ("down", "up")
        }

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The folder's weights, with adapters merged into copies of those that have some.

        Until the adapters change, those of a checkpoint are the ones that it holds: a version has
        one content, and other hardware may merge to the last bit otherwise.
        """
        if self._published and not self._is_as_loaded():
            self._loaded, self._published = {}, {}
        return {
            name: self._published[name] if name in self._published else self._merged(name, base)
            for name, base in self._base.items()
        }

    def _is_as_loaded(self) -> bool:
        own = self.parameters()
        return all(torch.equal(own[name], tensor) for name, tensor in self._loaded.items())

    def extra(self) -> dict[str, Tensor]:
        """The adapters."""
        return {name: parameter.detach() for name, parameter in self.parameters().items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        """See `Trainable`; merged they must be the given weights, but for rounding."""
        own = self.parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if {name: tuple(tensor.shape) for name, tensor in extra.items()} != shapes:
            raise ValueError(
                f"the checkpoint has {len(extra)} adapter tensors and trainer.lora asks for "
                f"{len(own)}, or of other shapes: it was written under another trainer.lora"
            )
        before = {name: parameter.clone() for name, parameter in own.items()}
        for name, parameter in own.items():
            parameter.copy_(extra[name])
        if layout_of(weights) != layout_of(self._base) or not all(
            self._is_made(name, tensor) for name, tensor in weights.items()
        ):
            for name, parameter in own.items():
                parameter.copy_(before[name])
            raise ValueError("the checkpoint's adapters do not make its weights of this folder's")
        self._loaded = {name: parameter.clone() for name, parameter in own.items()}
        self._published = {
            name: weights[name].to(self._base[name].device)
            for name in self._adapted
            if not is_same(weights[name], self._merged(name, self._base[name]))
        }

    def _is_made(self, name: str, found: Tensor) -> bool:
        """Whether the merged weight is `found`; without an adapter to the bit."""
        base = self._base[name]
        if name not in self._adapted:
            return is_same(found, base)
        off = (found.to(base.device).float() - self._merged(name, base).float()).abs()
        return bool((off <= self._adapted[name].rounding(base)).all())

    def _merged(self, name: str, base: Tensor) -> Tensor:
        if name not in self._adapted:
            return base
        low_rank = self._adapted[name]
        # Adding nothing would still turn a weight of -0.0 into 0.0, and so another hash.
        return low_rank.forward(base) if bool(low_rank.up.any()) else base


def is_same(one: Tensor, other: Tensor) -> bool:
    """The same bits, shape and dtype, on whatever devices."""
    return weight_hash({"": one}) == weight_hash({"": other})


def trainable_of(model: nn.Module, section: LoraSection) -> Trainable:
    """As the configuration asks."""
    return Adapters(model, section) if section.rank else AllWeights(model)
