"""A model over ranks, however it is cut: rows of every parameter, by the names of the parameters.

Optimizer and checkpoints know the rows alone, a published version the whole tensors. Three kinds:
`Whole` of one rank, FSDP2's `Shards`, and megatron-core's layers. A `TensorPlan` holds for each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.model import weights_of
from rlstreams.workers.model.token_scores import Score, ValueHead
from rlstreams.workers.trainer.learn.critic import PREFIX, named_head
from rlstreams.workers.trainer.learn.trainable import Trainable
from rlstreams.workers.weights.link.weight_hash import sums_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """The tensors of a whole model that are trained and published, by name."""

    facts: Mapping[str, Tensor]  # published name -> dtype and shape, on meta
    published: Mapping[str, str]  # published name -> parameter's path
    constant: Mapping[str, Tensor]  # buffers: whole on every rank
    trained: Mapping[str, str]  # trained name -> parameter's path
    extra: frozenset[str]  # trained, but in no version: adapters and a value head
    whole: Mapping[str, Tensor]  # path -> dtype and shape, on meta


def plan_of(
    model: nn.Module, trainable: Trainable | None, value_head: ValueHead | None = None
) -> TensorPlan:
    """The plan of a model that is not cut yet.

    Args:
        trainable: the parameters that learn; None: nothing learns.
        value_head: learns beside the model, and is no part of it.
    """
    head = named_head(value_head) if value_head else {}
    named = dict(model.named_parameters())
    paths = {parameter.data_ptr(): path for path, parameter in named.items()}
    own = {id(parameter): path for path, parameter in (named | head).items()}
    weights = trainable.weights() if trainable else weights_of(model)
    learning = (trainable.parameters() if trainable else {}) | head
    published = {n: paths[t.data_ptr()] for n, t in weights.items() if t.data_ptr() in paths}
    return TensorPlan(
        facts={n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in weights.items()},
        published=published,
        constant={n: t for n, t in weights.items() if n not in published},
        trained={name: own[id(p)] for name, p in learning.items()},
        extra=(trainable.extra() if trainable else frozenset()) | head.keys(),
        whole={path: torch.empty_like(p, device="meta") for path, p in (named | head).items()},
    )


Share = tuple[slice, ...]  # of a whole tensor, one slice for each of its first axes


@dataclass(frozen=True, slots=True)
class Version:
    """Weights that a rank holds beside those in its module."""

    rows: dict[str, Tensor] = field(default_factory=dict)  # by path
    tensors: dict[str, Tensor] = field(default_factory=dict)  # that rows are views of, if they are


class ShardedModel(ABC):
    """A model of which each rank has a share.

    Paths name parameters; all ranks call `add_up`, `gather`, `scatter` and `norm` in the same
    order, and those that have a path `assembled`. The parameters of a value head are beside the
    model's, and whole on every rank.

    Attributes:
        root: a `Score`; one forward of it is one pass of all ranks.
        rows: this rank's shares by path, in memory that the model computes with.
        hands: by rank, the hand of `deal` that it computes; ranks of one hand compute alike.
        voices: ranks whose loss totals count: one of each hand.
        no_gradient: makes the context in which a forward without a backward is computed.
        copies: whether `hold` copies a version's rows into the module, or points at them.
        is_whole: the rows are the model's own tensors, all of them.
        sums_once: gradients are summed over the ranks once an update, not in each pass.
    """

    root: Score
    model: nn.Module
    rows: dict[str, nn.Parameter]
    hands: Sequence[int]
    voices: frozenset[int]
    rank: int
    device: torch.device
    no_gradient: Callable[[], AbstractContextManager[Any]] = torch.inference_mode
    copies = True
    is_whole = False
    sums_once = True
    replicated: frozenset[str] = frozenset()

    def add_head(self, head: ValueHead) -> None:
        """Let a value head learn beside the model."""
        self._head, named = head, named_head(head)
        self.rows |= named
        self.replicated = frozenset(named)

    @torch.no_grad()
    def put_back(self, path: str, old: nn.Parameter) -> None:
        """Compute with the numbers of `old`: in its memory, or with `old` as the model's
        parameter."""
        rows = self.rows[path]
        rows.copy_(old)
        if path in self.replicated:
            self._head.register_parameter(path.removeprefix(PREFIX), old)
        else:
            old.data = rows.data  # the optimizer's parameter is from now on the gathered one
        self.rows[path] = old

    def expect(self, *, is_last: bool) -> None:  # noqa: B027
        """Prepare for a pass that learns; after an update's last one no gradient is left to sum."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the rows since the last call, by path; not those still in `grad`."""

    @abstractmethod
    def whole_shape(self, path: str) -> Sequence[int]:
        """Shape of a whole parameter of the model."""

    @abstractmethod
    def own_share(self, path: str, rank: int) -> Share | None:
        """Slices of a parameter of the model that a rank has; None: it has none."""

    def shape(self, path: str) -> Sequence[int]:
        """Shape of a whole parameter, of the model or the value head."""
        return self.rows[path].shape if path in self.replicated else self.whole_shape(path)

    def share(self, path: str, rank: int) -> Share | None:
        """Slices of a parameter that a rank has, model's or value head's; None: none."""
        if path in self.replicated:
            return tuple(slice(0, size) for size in self.shape(path))
        return self.own_share(path, rank)

    def add_up(self, path: str, gradient: Tensor) -> None:
        """Sum a batch's gradient in place over the ranks that have the same share."""
        if path in self.replicated and len(self.hands) > 1:
            if not self.adds_replicated:
                gradient.zero_()
            dist.all_reduce(gradient)

    @property
    def adds_replicated(self) -> bool:
        """Whether this rank's gradient of the value head counts in the sum over ranks."""
        return True

    @torch.no_grad()
    def norm(
        self, squares: Callable[[float], list[float]], gradients: Mapping[str, Tensor]
    ) -> Tensor:
        """Norm of the whole gradient, of which this rank has these rows.

        Args:
            squares: gathers one number of every rank, by rank.
        """
        owned = [gradient for path, gradient in gradients.items() if self.rank in self.owners(path)]
        norms = torch._foreach_norm(owned) if owned else ()
        own = float(torch.stack(norms).double().square().sum()) if norms else 0.0
        first, *others = squares(own)
        return torch.tensor(first + sum(others), dtype=torch.float64).sqrt()

    def buffers(self) -> Iterable[Tensor]:
        """Tensors that lie on the device beside the rows."""
        return self.model.buffers()

    def reshard(self) -> None:  # noqa: B027
        """Free parameters that were gathered for a pass."""

    def close(self) -> None:  # noqa: B027
        """Release all that the process group made."""

    def version(self) -> Version:
        """An empty version, to receive one more version's weights in."""
        return Version()

    def receive(self, version: Version, path: str, whole: Tensor | None) -> None:
        """Take this rank's rows of a tensor that rank 0 has."""
        rows: Tensor | None = None
        if path in self.rows:
            rows = torch.empty_like(self.rows[path], requires_grad=False)
            version.rows[path] = rows
        self.scatter(path, whole, rows)

    @torch.no_grad()
    def hold(self, version: Version) -> None:
        """Compute with these weights from now on."""
        for path, rows in version.rows.items():
            self.rows[path].copy_(rows)
        self.reshard()

    def release(self) -> None:  # noqa: B027
        """Free a version that was not copied: with it in the module one too many would be held."""

    def owners(self, path: str) -> dict[int, Share]:
        """The first rank that has each share, and the share."""
        found: dict[int, Share] = {}
        for rank in range(len(self.hands)):
            share = self.share(path, rank)
            if share is not None and share not in found.values():
                found[rank] = share
        return found

    @torch.no_grad()
    def gather(self, path: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Assemble a parameter, or a tensor of its shape, from all ranks on rank 0; None
        elsewhere."""
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
    def assembled(self, path: str, rows: Tensor) -> Tensor:
        """As `gather`, on each rank that has the path, in memory of its own."""
        whole = torch.empty(tuple(self.shape(path)), dtype=rows.dtype, device=self.device)
        for rank, share in self.owners(path).items():
            part = torch.empty_like(whole[share], memory_format=torch.contiguous_format)
            if rank == self.rank:
                part = rows.detach().reshape(part.shape).contiguous()
            dist.broadcast(_bytes(part), rank, group=self.stage_group())
            whole[share] = part
        return whole

    def own_rows(self, path: str, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, copied."""
        rows = torch.empty_like(self.rows[path], dtype=whole.dtype, requires_grad=False)
        share = self.share(path, self.rank)
        return rows if share is None else rows.copy_(whole[share].reshape(rows.shape))

    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that have shares of the same parameters; None: all."""
        return None

    @torch.no_grad()
    def scatter(self, path: str, whole: Tensor | None, rows: Tensor | None) -> None:
        """Distribute a tensor: rank 0 has `whole`, and every rank's `rows` are filled from it."""
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
        """Sums for the hash over this rank's rows; None where ranks have columns, so that the hash
        needs the whole tensor."""
        owners, shape = self.owners(path), self.shape(path)
        columns = [slice(0, size) for size in shape[1:]]
        if any(list(share[1:]) != columns[: len(share) - 1] for share in owners.values()):
            return None
        if self.rank not in owners:
            return torch.zeros(2, dtype=torch.int64, device=self.device)
        start = owners[self.rank][0].start
        return sums_of(self.rows[path].detach(), start * math.prod(shape[1:]))


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, as every transport takes them: NCCL has no 16-bit integers. A view, or a
    copy if the rows are not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Whole(ShardedModel):
    """A model that one rank has alone: the rows are its own parameters, and nothing is copied."""

    copies, is_whole = False, True

    def __init__(self, model: nn.Module, root: Score) -> None:
        self.model, self.root, self.rank = model, root, 0
        self.hands, self.voices = [0], frozenset({0})
        self.rows = dict(model.named_parameters())
        self.device = next(iter(self.rows.values())).device
        self._shapes = {path: parameter.shape for path, parameter in self.rows.items()}
        # Several tied tensors may share one memory.
        by_memory: defaultdict[int, list[Tensor]] = defaultdict(list)
        for tensor in model.state_dict(keep_vars=True).values():
            by_memory[tensor.data_ptr()].append(tensor)
        self._tensors = {path: by_memory[p.data_ptr()] for path, p in self.rows.items()}

    def gradients(self) -> dict[str, Tensor]:
        """No gradients: the optimizer takes each as the backward makes it."""
        return {}

    def whole_shape(self, path: str) -> Sequence[int]:
        """See `ShardedModel`."""
        return self._shapes[path]

    def own_share(self, path: str, rank: int) -> Share | None:
        """See `ShardedModel`: the whole parameter."""
        del rank
        return tuple(slice(0, size) for size in self._shapes[path])

    @torch.no_grad()
    def norm(
        self, squares: Callable[[float], list[float]], gradients: Mapping[str, Tensor]
    ) -> Tensor:
        """See `ShardedModel`: torch's own norm, tensor by tensor in their own precision."""
        del squares
        return nn.utils.get_total_norm(list(gradients.values()))

    def gather(self, path: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """See `ShardedModel`: the rows themselves."""
        del path, dtype
        return rows

    def receive(self, version: Version, path: str, whole: Tensor | None) -> None:
        """See `ShardedModel`."""
        assert whole is not None, "a rank alone is rank 0"
        # Tensors of a file lie in the file's memory, which may be deleted: copied, where they stay.
        version.rows[path] = whole.to(self.device, copy=self.device.type == CPU)

    def hold(self, version: Version) -> None:
        """Point the model at the version: all versions share the compiled layers."""
        for path, own in self._tensors.items():
            for tensor in own:
                tensor.data = version.rows[path]

    def release(self) -> None:
        """See `ShardedModel`."""
        for own in self._tensors.values():
            for tensor in own:
                tensor.data = tensor.new_empty(0)
