"""One of two processes that hold the demo's model in shards; rank 0 serves it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlstreams.workers.model.model import load_model
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.collective import CollectiveWeightServer
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.sender import Limits
from rlstreams.workers.weights.sharded import ShardedWeights
from tests.contract.engine_rigs import announced
from tests.contract.test_collective_channel import EPOCH, SECRET, Log

MODEL = Path(__file__).parents[2] / "infra" / "examples" / "demo" / "model"
RANKS = 2
WAIT_S = 120.0


def changed(model: torch.nn.Module) -> torch.nn.Module:
    """Weights that are not those of the folder: a step that needs no data."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 0.01 * number)
    return model


def main(rank: int, folder: Path, parent: Connection) -> None:
    """Serve two versions: one by a snapshot, one without; then end."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = load_model(MODEL, "float32")
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for version, place in enumerate(("device", "none")):
        changed(model)
        weights = ShardedWeights(model)
        if rank:
            weights.follow()
        else:
            _serve(weights, version, place, parent)
    dist.barrier()  # a group that one rank leaves while the other still sends ends with a signal
    dist.destroy_process_group()


def _serve(weights: ShardedWeights, version: int, place: str, parent: Connection) -> None:
    """Tell the parent what can be pulled, pass its request on, and wait until it has it."""
    limits = Limits(window_s=0.01, form_s=WAIT_S, stall_s=WAIT_S)
    server = CollectiveWeightServer(
        "gloo", host="127.0.0.1", secret=SECRET, log=Log(), limits=limits, place=place
    )
    server.open(EPOCH)
    with weights:
        manifest = server.publish(version, weights)
        parent.send((announced(server, manifest), weight_hash(weights), len(weights)))
        assert parent.poll(WAIT_S), "the puller does not ask"
        server.serve(parent.recv())
        assert parent.poll(WAIT_S), "the puller does not end"
        parent.recv()
        server.before_change()
    server.close()


def disagree(rank: int, folder: Path) -> None:
    """Another model than rank 0 has: told on every rank."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    with pytest.raises(WeightError, match=r"ranks \[1\] of 2"):
        ShardedWeights(torch.nn.Linear(8, 8 + rank))
    dist.destroy_process_group()
