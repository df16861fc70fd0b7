"""A model in FSDP2 shards, as one rank has it: rows of every parameter, in tensors of its own.

Each decoder layer is a unit that is gathered for its forward and backward; embeddings, last norm
and head are one more, which stays whole from forward to backward: the head is applied in chunks, on
some ranks more often than on others, and no gathering may depend on that. Gradients are sums over
the ranks, in float32. Optimizer and checkpoints know only the rows, by the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.token_scores import TokenScorer, TokenScores
from rlstreams.workers.trainer.learn.trainable import Trainable
from rlstreams.workers.weights.link.weight_hash import sums_of

_PREFIX = "model."  # of a parameter in the root


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What of a whole model is trained and published, by name."""

    facts: Mapping[str, Tensor]  # published name -> dtype and shape, on meta
    published: Mapping[str, str]  # published name -> parameter's path
    constant: Mapping[str, Tensor]  # buffers: whole on every rank
    trained: Mapping[str, str]  # trained name -> parameter's path
    adapters: frozenset[str]  # names of adapters among the trained
    whole: Mapping[str, Tensor]  # path -> dtype and shape, on meta


def plan_of(model: nn.Module, trainable: Trainable) -> Plan:
    """Of a model before it is cut."""
    paths = {parameter.data_ptr(): path for path, parameter in model.named_parameters()}
    own = {id(parameter): path for path, parameter in model.named_parameters()}
    weights = trainable.weights()
    published = {n: paths[t.data_ptr()] for n, t in weights.items() if t.data_ptr() in paths}
    return Plan(
        facts={n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in weights.items()},
        published=published,
        constant={n: t for n, t in weights.items() if n not in published},
        trained={name: own[id(p)] for name, p in trainable.parameters().items()},
        adapters=frozenset(trainable.extra()),
        whole={path: torch.empty_like(p, device="meta") for path, p in model.named_parameters()},
    )


class ShardedModel(Protocol):
    """A model of which each rank has a share: FSDP2's `Shards`, or megatron-core's layers.

    Paths name parameters; all ranks call `add_up`, `gather` and `scatter` in the same order.

    `rows` are this rank's shares by path, in memory that the model computes with.
    """

    rows: dict[str, nn.Parameter]

    @property
    def root(self) -> nn.Module:
        """A `Score`; one forward of it is one pass of all ranks."""

    @property
    def hands(self) -> Sequence[int]:
        """By rank, which of the hands that are dealt it computes."""

    @property
    def voices(self) -> frozenset[int]:
        """Ranks whose totals count: one of each hand."""

    def gradients(self) -> dict[str, Tensor]:
        """Those of the rows since the last call; by path."""

    def add_up(self, path: str, gradient: Tensor) -> None:
        """Sum a batch's gradient in place over the ranks that have the same share."""

    def owns(self, path: str) -> bool:
        """Whether this rank is the first that has its share."""

    def gather(self, path: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What all ranks have of a parameter's shape as one tensor, on rank 0; None elsewhere."""

    def scatter(self, path: str, whole: Tensor | None, rows: Tensor | None) -> None:
        """The other way: rank 0 has `whole`, every rank's `rows` are filled."""

    def sums(self, path: str) -> Tensor | None:
        """What the hash adds up of this rank's rows; None: it takes the whole tensor."""

    def close(self) -> None:
        """Let go of what the process group made."""


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

    def __init__(self, scorer: TokenScorer, mesh: DeviceMesh, field: str = "trainer.ranks") -> None:
        """
        Args:
            field: that asks for several ranks, for messages.

        Raises:
            ConfigError: a model that cannot be cut so; names what is in the way.
        """
        self.root = _Root(scorer)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in units_of(scorer.model, field):
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
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        self.hands, self.voices = range(self._size), frozenset(range(self._size))
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

    def add_up(self, path: str, gradient: Tensor) -> None:
        """See `ShardedModel`: they are sums already."""

    def owns(self, path: str) -> bool:
        """See `ShardedModel`."""
        return path in self.rows

    def gather(self, path: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """See `ShardedModel`."""
        del dtype
        assert rows is not None, "every rank has rows of each"
        return gather(rows, self._cut[path], self._rank, self._size)

    def scatter(self, path: str, whole: Tensor | None, rows: Tensor | None) -> None:
        """See `ShardedModel`."""
        del path
        assert rows is not None, "likewise"
        scatter(whole, rows, self._rank, self._size)

    def sums(self, path: str) -> Tensor | None:
        """See `ShardedModel`."""
        shape = self._cut[path].shape
        first, _ = span(self._rank, self._size, shape[0])
        return sums_of(self.rows[path].detach(), first * shape[1:].numel())

    def close(self) -> None:
        """See `ShardedModel`."""


def units_of(model: nn.Module, field: str = "trainer.ranks") -> list[nn.Module]:
    """The layers that are gathered one by one.

    Args:
        field: that asks for several ranks, for messages.

    Raises:
        ConfigError: none is marked, or the model has what FSDP2 cannot cut.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    kind = type(model).__name__
    units = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
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
