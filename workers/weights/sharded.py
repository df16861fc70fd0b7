"""Weights of a model that torch's `fully_shard` (FSDP2) has spread over ranks, served by rank 0.

On rank 0 they are a mapping like any model's, so hashing, snapshots and broadcasts need not know.
Reading a tensor gathers it, on all ranks together: the others stand in `follow` and do what rank 0
asks. What it costs beside the shards: the largest tensor on every rank, and what a broadcast has
under way on rank 0; on the wire each reading moves the model once between the ranks. Hash, snapshot
and broadcast are three readings without a snapshot, two with one.

    weights = ShardedWeights(model)
    if rank == 0:
        with weights:
            manifest = server.publish(version, weights)   # and announce it
            server.before_change()                        # snapshot "none": until it is pulled
    else:
        weights.follow()

For a trainer of your own. The role `trainer` gathers its ranks' weights by the commands that its
followers obey anyway (workers/trainer/parallel), and so needs nobody who stands in `follow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import LazyWeights, layout_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_END = -1


class ShardedWeights(LazyWeights):
    """The whole tensors of a sharded model, one at a time."""

    def __init__(self, model: torch.nn.Module, *, group: ProcessGroup | None = None) -> None:
        """Collective: every rank of `group` makes its own, of the same model.

        Args:
            group: of all ranks that hold a shard; None: the default one. Its timeout bounds every
                wait in `follow`: it must be longer than the trainer's wait for pullers.

        Raises:
            WeightError: the ranks do not hold the same names, dtypes and shapes.
        """
        import torch.distributed

        self.facts = named_tensors(model)
        self._names = list(self.facts)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._group = group or torch.distributed.group.WORLD
        self._rank = torch.distributed.get_rank(self._group)
        is_gloo = torch.distributed.get_backend(self._group) == "gloo"
        self._device = torch.device("cpu" if is_gloo else "cuda")
        self._check_equal()

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole tensor. Collective, see `follow`.

        Raises:
            RuntimeError: not on rank 0.
        """
        if self._rank != 0:
            raise RuntimeError(f"rank {self._rank} follows; only rank 0 reads weights")
        self._share(self._numbers[name])
        return self._whole(name)

    def __iter__(self) -> Iterator[str]:
        """In name order."""
        return iter(self.facts)

    def __len__(self) -> int:
        """Tensors."""
        return len(self.facts)

    def __enter__(self) -> ShardedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Rank 0 has read what it wanted: let the others go on; they may follow again later."""
        self._share(_END)

    def follow(self) -> None:
        """On every rank but 0: take part in what it reads, until it releases us.

        Raises:
            RuntimeError: on rank 0; or the group's timeout passed.
        """
        if self._rank == 0:
            raise RuntimeError("rank 0 leads: it reads weights, and releases the others")
        while (number := self._share()) != _END:
            self._whole(self._names[number])

    def _whole(self, name: str) -> torch.Tensor:
        """`full_tensor` knows every placement: shards, replicas, both."""
        from torch.distributed.tensor import DTensor

        tensor = self.facts[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _share(self, number: int = 0) -> int:
        """Rank 0's number, on every rank; only the others wait for it."""
        import torch

        word = torch.tensor([number], dtype=torch.int64, device=self._device)
        torch.distributed.broadcast(word, group=self._group, group_src=0)
        return int(word.item()) if self._rank else number

    def _check_equal(self) -> None:
        """Ranks that gather in different orders would mix tensors up, or hang."""
        import torch.distributed

        size = torch.distributed.get_world_size(self._group)
        found = [""] * size
        torch.distributed.all_gather_object(found, layout_of(self.facts), group=self._group)
        if others := [rank for rank, one in enumerate(found) if one != found[0]]:
            raise WeightError(
                f"ranks {others} of {size} hold other names, dtypes or shapes than rank 0: "
                "all must shard the same model"
            )


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and kept buffers by the names of `state_dict()`, in name order, tied ones once.

    As `workers.model.model.weights_of`, which tells tied tensors by their storage; a shard may be
    empty and have none, so here the parameter itself tells.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    named: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        identity = id(own.get(name, tensor))
        if identity not in seen:
            seen.add(identity)
            named[name] = tensor.detach()
    return named
