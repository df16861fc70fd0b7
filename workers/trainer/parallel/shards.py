"""A model in FSDP2 shards, as one rank has it: rows of every parameter, in tensors of its own.

Each decoder layer is a unit that is gathered for its forward and backward; embeddings, last norm
and head are one more, which stays whole from forward to backward: the head is applied in chunks, on
some ranks more often than on others, and no gathering may depend on that. Gradients are sums over
the ranks, in float32. Optimizer and checkpoints know only the rows, by the names of the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.token_scores import TokenScorer, TokenScores
from rlstreams.workers.trainer.learn.trainable import Trainable

_PREFIX = "model."  # of a parameter in the root


class Plan:
    """What of a whole model is trained and published, by name. Made before it is cut."""

    def __init__(self, model: nn.Module, trainable: Trainable) -> None:
        paths = {parameter.data_ptr(): path for path, parameter in model.named_parameters()}
        own = {id(parameter): path for path, parameter in model.named_parameters()}
        published = trainable.weights()
        self.facts = {
            name: torch.empty(t.shape, dtype=t.dtype, device="meta")
            for name, t in published.items()
        }
        self.published = {
            name: paths[t.data_ptr()] for name, t in published.items() if t.data_ptr() in paths
        }
        """Published name -> parameter's path."""
        self.constant = {n: t for n, t in published.items() if n not in self.published}
        """Buffers: whole on every rank."""
        self.trained = {name: own[id(p)] for name, p in trainable.parameters().items()}
        """Trained name -> parameter's path."""
        self.adapters = frozenset(trainable.extra())
        """Names of adapters among the trained."""
        self.whole = {
            path: torch.empty_like(p, device="meta") for path, p in model.named_parameters()
        }
        """Path -> its shape."""


class _Root(nn.Module):
    """The scorer as a module: one forward of it is one pass through the model."""

    def __init__(self, scorer: TokenScorer) -> None:
        super().__init__()
        self.model = scorer.model
        self.routing = scorer.routing
        self._scorer = scorer

    def forward(self, *inputs: Any) -> TokenScores:  # noqa: ANN401
        scores = self._scorer(*inputs)
        # No view: what is done to one in place would get past the hook that gathers for backward.
        return TokenScores(*(values_N.clone() for values_N in scores))


class Shards:
    """The model of a scorer, cut. From here on the model's forward is `root`'s."""

    def __init__(self, scorer: TokenScorer, mesh: DeviceMesh) -> None:
        """
        Raises:
            ConfigError: a model that cannot be cut so; names what is in the way.
        """
        self.root = _Root(scorer)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in units_of(scorer.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.root, mesh=mesh, mp_policy=policy)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: the loss is divided already
                module.set_force_sum_reduction_for_comms(True)
                # Now, not in the first forward: it may move the rows of an uneven cut.
                module.unshard()
                module.reshard()
        self._cut: dict[str, Any] = {
            path.removeprefix(_PREFIX): parameter
            for path, parameter in self.root.named_parameters()
        }
        self.rows = {
            path: nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
            for path, parameter in self._cut.items()
        }
        """By path; memory that the model is gathered from, so a change is seen by all ranks."""

    def gradients(self) -> dict[str, Tensor]:
        """Those of the rows, summed over the ranks, since the last call; by path."""
        found = {}
        for path, parameter in self._cut.items():
            if parameter.grad is not None:
                found[path] = parameter.grad.to_local()
                parameter.grad = None
        return found


def units_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one by one.

    Raises:
        ConfigError: none is marked, or the model has what FSDP2 cannot cut.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    kind = type(model).__name__
    units = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not units:
        raise ConfigError(
            f"trainer.ranks is above 1, but a {kind} has no layer that its library marks as one: "
            "train it on one rank"
        )
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if scalars:
        raise ConfigError(
            f"trainer.ranks is above 1, but {scalars[0]} of a {kind} is a single number, which has "
            "no rows to share out: train it on one rank"
        )
    # An expert that no token of a rank is routed to has no gradient there: the sum would wait.
    loose = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and "expert" in n]
    if loose:
        raise ConfigError(
            f"trainer.ranks is above 1, but {loose[0]} of a {kind} holds experts one by one, not "
            "in one tensor: train it on one rank"
        )
    return units


def span(rank: int, size: int, num_rows: int) -> tuple[int, int]:
    """A rank's first row, and the row behind its last: equal shares, the last ones less."""
    share = -(-num_rows // size)
    return min(rank * share, num_rows), min((rank + 1) * share, num_rows)


@torch.no_grad()
def gather(rows: Tensor, whole: Tensor, rank: int, size: int) -> Tensor | None:
    """Every rank's rows as one tensor, on rank 0; None elsewhere. All ranks call it.

    Args:
        rows: this rank's.
        whole: of the whole shape; only its shape is looked at.
    """
    if rank:
        if rows.numel():
            dist.send(_bytes(rows), 0)
        return None
    found = torch.empty(whole.shape, dtype=rows.dtype, device=rows.device)
    for other in range(size):
        first, end = span(other, size, whole.shape[0])
        if other == 0:
            found[first:end] = rows
        elif end > first:
            dist.recv(_bytes(found[first:end]), other)
    return found


@torch.no_grad()
def scatter(whole: Tensor | None, rows: Tensor, rank: int, size: int) -> None:
    """The other way: rank 0 has `whole`, every rank's `rows` are filled."""
    if whole is None:
        if rows.numel():
            dist.recv(_bytes(rows), 0)
        return
    assert rank == 0, "rank 0 has the whole tensor"
    for other in range(size):
        first, end = span(other, size, whole.shape[0])
        part = whole[first:end].to(device=rows.device, dtype=rows.dtype).contiguous()
        if other == 0:
            rows.copy_(part)
        elif end > first:
            dist.send(_bytes(part), other)


def _bytes(tensor: Tensor) -> Tensor:
    """A view that every transport knows: NCCL has no 16-bit integers."""
    return tensor.detach().reshape(-1).view(torch.uint8)
