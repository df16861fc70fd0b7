"""A model in FSDP2 shards, as one rank has it: rows of every parameter, in tensors of its own.

Each decoder layer is a unit that is gathered for its forward and backward. Embeddings, last norm
and head are one more unit, which stays whole from forward to backward: the head is applied in
chunks, on some ranks more often than on others, and no gathering may depend on that. Gradients are
sums over the ranks, in float32.

Where memory allows, passes of one update exchange nothing: weights stay whole from the first to the
last, and gradients add up whole, in float32, until the last one sums them over the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.mesh import Mesh
from rlstreams.workers.compute.shards import ShardedModel, Share
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.context import SlicedScores
from rlstreams.workers.model.layers import marked_layers
from rlstreams.workers.model.token_scores import Score, TokenScorer, TokenScores

_PREFIX = "model."  # of a parameter's path in the root
# Of a device's whole memory: what weights, and weights with gradients, may take to stay whole.
WEIGHTS_SHARE = GRADIENTS_SHARE = 1 / 6
_SUM_BYTES = 4  # float32


class HeldWhole(NamedTuple):
    """Tensors that a rank holds whole from pass to pass of one update."""

    weights: bool = False
    gradients: bool = False

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh) -> HeldWhole:
        """As much as all ranks have room for, by the sizes of their devices. What is free of them
        does not count: a redo must sum in the same order."""
        every = list(model.parameters())
        weights = sum(p.numel() * p.element_size() for p in every)
        sums = sum(p.numel() * _SUM_BYTES for p in every if p.requires_grad)
        size = _memory_bytes(mesh.device)
        own = cls(weights <= WEIGHTS_SHARE * size, weights + sums <= GRADIENTS_SHARE * size)
        return cls(*map(all, zip(*mesh.gathered(own), strict=True)))


NOTHING_HELD = HeldWhole()


class _Root(nn.Module):
    """The scorer as a module: one forward of it is one pass through the model."""

    def __init__(self, scorer: TokenScorer | SlicedScores) -> None:
        super().__init__()
        self.model = scorer.model
        self.routing = scorer.routing
        self._scorer = scorer

    def forward(self, *inputs: Any) -> TokenScores:  # noqa: ANN401
        scores = self._scorer(*inputs)
        # Clones, not views: an operation in place on a view would skip the hook that gathers for
        # backward.
        copies: Any = (None if own is None else own.clone() for own in scores)
        return TokenScores(*copies)


class Shards(ShardedModel):
    """The model of a scorer, cut into shards. Its forward is from now on that of `root`."""

    no_gradient = torch.no_grad

    def __init__(
        self,
        scorer: TokenScorer | SlicedScores,
        mesh: DeviceMesh,
        field: str = "trainer.ranks",
        cp: int = 1,
        held: HeldWhole = NOTHING_HELD,
    ) -> None:
        """
        Args:
            field: the setting that asks for several ranks, for messages.
            cp: number of neighbouring ranks that compute the same rows.
            held: what stays whole between passes; the same on all ranks.

        Raises:
            ConfigError: a model that cannot be cut so; names the obstacle.
        """
        root = _Root(scorer)
        self.root, self.model = cast(Score, root), scorer.model
        self._held, self.sums_once = held, held.gradients
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in units_of(scorer.model, field):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(root, mesh=mesh, mp_policy=policy)
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for module in self._units:
            module.set_gradient_divide_factor(1.0)  # a sum: the loss is divided already
            module.set_force_sum_reduction_for_comms(True)
            # Now, not in the first forward: it may move the rows of an uneven cut.
            module.unshard()
            module.reshard()
        self._cut: dict[str, Any] = {
            path.removeprefix(_PREFIX): parameter for path, parameter in root.named_parameters()
        }
        ranks, self.rank = range(mesh.size()), mesh.get_local_rank()
        self.hands, self.voices = [rank // cp for rank in ranks], frozenset(ranks[::cp])
        self.rows = {
            path: nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
            for path, parameter in self._cut.items()
        }
        self.device = next(iter(self.rows.values())).device

    def expect(self, *, is_last: bool) -> None:
        """See `ShardedModel`."""
        for module in self._units:
            if self._held.gradients:
                module.set_requires_gradient_sync(is_last, recurse=False)
            if self._held.weights:
                # Whole in the last backward too, which then frees them: the optimizer changes rows.
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(is_last, recurse=False)

    def reshard(self) -> None:
        """See `ShardedModel`: after a forward without a backward the root is still whole."""
        for module in self._units:
            module.reshard()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the rows since the last call, summed over the ranks; by path."""
        found = {}
        for path, parameter in self._cut.items():
            if parameter.grad is not None:
                found[path] = parameter.grad.to_local()
                parameter.grad = None
        return found

    def whole_shape(self, path: str) -> Sequence[int]:
        """See `ShardedModel`."""
        shape: Sequence[int] = self._cut[path].shape
        return shape

    def own_share(self, path: str, rank: int) -> Share | None:
        """See `ShardedModel`: equal shares of the rows; the last ranks may have fewer, or none."""
        num_rows = self.whole_shape(path)[0]
        each = -(-num_rows // len(self.hands))
        first, end = rank * each, min((rank + 1) * each, num_rows)
        return (slice(first, end),) if first < end else None


def units_of(model: nn.Module, field: str) -> list[nn.Module]:
    """The layers that are gathered one by one.

    Args:
        field: the setting that asks for several ranks, for messages.

    Raises:
        ConfigError: the library marks no layer, or the model has a part that FSDP2 cannot cut.
    """
    kind, units = type(model).__name__, marked_layers(model)
    if not units:
        raise ConfigError(
            f"{field} is above 1, but a {kind} has no layer that its library marks as one: "
            "set it to 1"
        )
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if scalars:
        raise ConfigError(
            f"{field} is above 1, but {scalars[0]} of a {kind} is a single number, which has "
            "no rows to share out: set it to 1"
        )
    # An expert that no token of a rank is routed to has no gradient there: the sum would wait.
    loose = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and "expert" in n]
    if loose:
        raise ConfigError(
            f"{field} is above 1, but {loose[0]} of a {kind} holds experts one by one, not "
            "in one tensor: set it to 1"
        )
    return units


def _memory_bytes(device: str) -> int:
    """Size of the device's memory."""
    if device == CPU:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(0).total_memory
