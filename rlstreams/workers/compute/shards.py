"""A model in FSDP2 shards, as one rank has it: rows of every parameter, in tensors of its own.

Each decoder layer is a unit that is gathered for its forward and backward; embeddings, last norm
and head are one more, which stays whole from forward to backward: the head is applied in chunks, on
some ranks more often than on others, and no gathering may depend on that. Gradients are sums over
the ranks, in float32. Optimizer and checkpoints know only the rows, by the names of the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.context import SlicedScorer
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


Share = tuple[slice, ...]  # of a whole tensor, one slice for each of its first axes


class ShardedModel(ABC):
    """A model of which each rank has a share: FSDP2's `Shards`, or megatron-core's layers.

    Paths name parameters; all ranks call `add_up`, `gather` and `scatter` in the same order.

    Attributes:
        root: a `Score`; one forward of it is one pass of all ranks.
        rows: this rank's shares by path, in memory that the model computes with.
        hands: by rank, which of the hands that are dealt it computes.
        voices: ranks whose totals count: one of each hand.
    """

    root: nn.Module
    rows: dict[str, nn.Parameter]
    hands: Sequence[int]
    voices: frozenset[int]
    rank: int
    device: torch.device

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Those of the rows since the last call; by path."""

    @abstractmethod
    def shape(self, path: str) -> Sequence[int]:
        """Of the whole parameter."""

    @abstractmethod
    def share(self, path: str, rank: int) -> Share | None:
        """What a rank has of a parameter; None: nothing."""

    def add_up(self, path: str, gradient: Tensor) -> None:  # noqa: B027
        """Sum a batch's gradient in place over the ranks that have the same share."""

    def reshard(self) -> None:  # noqa: B027
        """Let go of parameters that were gathered for a pass."""

    def close(self) -> None:  # noqa: B027
        """Let go of what the process group made."""

    def owners(self, path: str) -> dict[int, Share]:
        """The first rank of each share, and the share."""
        found: dict[int, Share] = {}
        for rank in range(len(self.hands)):
            share = self.share(path, rank)
            if share is not None and share not in found.values():
                found[rank] = share
        return found

    @torch.no_grad()
    def gather(self, path: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What all ranks have of a parameter's shape as one tensor, on rank 0; None elsewhere."""
        owners = self.owners(path)
        if self.rank:
            if self.rank in owners:
                assert rows is not None, "an owner has rows"
                dist.send(_bytes(rows), 0)
            return None
        whole = torch.empty(tuple(self.shape(path)), dtype=dtype, device=self.device)
        for rank, share in owners.items():
            into = torch.empty_like(whole[share], memory_format=torch.contiguous_format)
            if rank == 0:
                assert rows is not None, "likewise"
                into = rows.reshape(into.shape)
            else:
                dist.recv(_bytes(into), rank)
            whole[share] = into
        return whole

    @torch.no_grad()
    def scatter(self, path: str, whole: Tensor | None, rows: Tensor | None) -> None:
        """The other way: rank 0 has `whole`, every rank's `rows` are filled."""
        if whole is None:
            if rows is not None and rows.numel():
                into = torch.empty_like(rows, memory_format=torch.contiguous_format)
                dist.recv(_bytes(into), 0)
                rows.copy_(into)
            return
        dtype = whole.dtype if rows is None else rows.dtype
        for rank in range(len(self.hands)):
            share = self.share(path, rank)
            if share is None:
                continue
            part = whole[share].to(device=self.device, dtype=dtype)
            if rank == 0:
                assert rows is not None, "rank 0 has this share"
                rows.copy_(part.reshape(rows.shape))
            else:
                dist.send(_bytes(part), rank)

    def sums(self, path: str) -> Tensor | None:
        """What the hash adds up of this rank's rows; None: it takes the whole tensor, of which
        ranks have columns."""
        owners, shape = self.owners(path), self.shape(path)
        columns = [slice(0, size) for size in shape[1:]]
        if any(list(share[1:]) != columns[: len(share) - 1] for share in owners.values()):
            return None
        if self.rank not in owners:
            return torch.zeros(2, dtype=torch.int64, device=self.device)
        start = owners[self.rank][0].start
        return sums_of(self.rows[path].detach(), start * math.prod(shape[1:]))


def _bytes(tensor: Tensor) -> Tensor:
    """A view that every transport knows: NCCL has no 16-bit integers. A copy of rows that lie
    apart."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Root(nn.Module):
    """The scorer as a module: one forward of it is one pass through the model."""

    def __init__(self, scorer: TokenScorer | SlicedScorer) -> None:
        super().__init__()
        self.model = scorer.model
        self.routing = scorer.routing
        self._scorer = scorer

    def forward(self, *inputs: Any) -> TokenScores:  # noqa: ANN401
        scores = self._scorer(*inputs)
        # No view: what is done to one in place would get past the hook that gathers for backward.
        return TokenScores(*(values_N.clone() for values_N in scores))


class Shards(ShardedModel):
    """The model of a scorer, cut. From here on the model's forward is `root`'s."""

    def __init__(
        self,
        scorer: TokenScorer | SlicedScorer,
        mesh: DeviceMesh,
        field: str = "trainer.ranks",
        cp: int = 1,
    ) -> None:
        """
        Args:
            field: that asks for several ranks, for messages.
            cp: so many neighbours compute the same rows.

        Raises:
            ConfigError: a model that cannot be cut so; names what is in the way.
        """
        self.root: _Root = _Root(scorer)
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
        ranks, self.rank = range(mesh.size()), mesh.get_local_rank()
        self.hands, self.voices = [rank // cp for rank in ranks], frozenset(ranks[::cp])
        self.rows = {
            path: nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
            for path, parameter in self._cut.items()
        }
        self.device = next(iter(self.rows.values())).device

    def reshard(self) -> None:
        """See `ShardedModel`: the root stays whole behind a forward without a backward."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gradients(self) -> dict[str, Tensor]:
        """Those of the rows, summed over the ranks, since the last call; by path."""
        found = {}
        for path, parameter in self._cut.items():
            if parameter.grad is not None:
                found[path] = parameter.grad.to_local()
                parameter.grad = None
        return found

    def shape(self, path: str) -> Sequence[int]:
        """See `ShardedModel`."""
        shape: Sequence[int] = self._cut[path].shape
        return shape

    def share(self, path: str, rank: int) -> Share | None:
        """See `ShardedModel`: equal shares of the rows, the last ones less."""
        num_rows = self.shape(path)[0]
        each = -(-num_rows // len(self.hands))
        first, end = rank * each, min((rank + 1) * each, num_rows)
        return (slice(first, end),) if first < end else None


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
