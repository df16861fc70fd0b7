"""A model that FSDP2 has spread over GPUs, as a stand that serves versions of it.

Rank 0 of the trainer serves; the other ranks take part in its readings. Each rank makes its rows of
a version's content, which whoever pulls can make himself and compare.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlstreams.workers.weights.collective import CollectiveWeightServer
from rlstreams.workers.weights.sender import Limits
from rlstreams.workers.weights.sharded import ShardedWeights, named_tensors
from tests.gpu.model_rows import SHAPES, Row, trainer_rows
from tests.gpu.puller import device_of, fill
from tests.gpu.weight_transfer import EPOCH, SECRET, Notes

PLACES = ("device", "pinned", "none")


def sharded_model(rows: Sequence[Row], ranks: int, device: torch.device) -> nn.Module:
    """Parameters of the rows, sharded over all ranks; never whole on one."""
    model = nn.Module()
    for name, dtype, shape in rows:
        *folders, leaf = name.split(".")
        place = model
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, nn.Module())
            place = place.get_submodule(folder)
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        place.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    fully_shard(model, mesh=init_device_mesh(device.type, (ranks,)))
    return model.to_empty(device=device)


def fill_shards(model: nn.Module, version: int, rank: int, ranks: int) -> None:
    """This rank's rows of what `fill` makes of each whole tensor."""
    for name, tensor in named_tensors(model).items():
        assert isinstance(tensor, DTensor)
        local = tensor.to_local()
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
        fill(whole, version, name)
        chunks = whole.chunk(ranks)
        if rank < len(chunks):
            local.copy_(chunks[rank])


def start_rank(args: argparse.Namespace, rank: int, port: int) -> nn.Module:
    """Join the trainer's ranks."""
    device = device_of(args.backend, rank)
    store = dist.TCPStore("127.0.0.1", port, args.ranks, rank == 0, timedelta(seconds=120))
    here = device if device.type == "cuda" else None
    dist.init_process_group(
        args.backend, store=store, rank=rank, world_size=args.ranks, device_id=here
    )
    return sharded_model(trainer_rows(SHAPES[args.model]), args.ranks, device)


def other_rank(pipe: Connection, args: argparse.Namespace, rank: int, port: int) -> None:
    """Fill, or follow, as rank 0 says."""
    torch.set_num_threads(1)
    model = start_rank(args, rank, port)
    weights = ShardedWeights(model)
    while (order := pipe.recv())["do"] != "end":
        if order["do"] == "fill":
            fill_shards(model, order["version"], rank, args.ranks)
            pipe.send({"filled": order["version"]})
        else:
            weights.follow()


class ShardedStand:
    """Rank 0 of the trainer, the pipes to its other ranks, and what pullers need of a stand."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes = []
        for rank in range(1, args.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, args, rank, port)
            context.Process(target=other_rank, args=arguments, daemon=True).start()
            self._pipes.append(ours)
        self._model = start_rank(args, 0, port)
        self.weights = ShardedWeights(self._model)
        self.device = device_of(args.backend, 0)
        self.num_bytes = sum(t.numel() * t.element_size() for t in self.weights.facts.values())
        self.notes = Notes()
        self.version = -1

    def tell(self, **order: Any) -> None:
        """All other ranks."""
        for pipe in self._pipes:
            pipe.send(order)

    def fill(self) -> None:
        """The next version, on all ranks."""
        self.version += 1
        self.tell(do="fill", version=self.version)
        fill_shards(self._model, self.version, 0, self.args.ranks)
        for pipe in self._pipes:
            assert pipe.poll(300), "a rank is silent"
            pipe.recv()

    def serve_from(self, place: str) -> None:
        """A server whose snapshots lie there."""
        self.server = CollectiveWeightServer(
            self.args.backend,
            host="127.0.0.1",
            secret=SECRET,
            log=self.notes,
            limits=Limits(window_s=0.02, form_s=60.0, stall_s=60.0),
            place=place,
            device=self.device,
        )
        self.server.open(EPOCH)
