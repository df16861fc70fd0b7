"""Weight pulls from a model that FSDP2 has spread over GPUs, against a plain broadcast.

    python tests/gpu/sharded_transfer.py --model 30b-a3b --ranks 2 --pullers 1 --out result.json
    python tests/gpu/sharded_transfer.py --backend gloo --model small   # no GPU needed

Rank 0 of the trainer serves; the other ranks take part in its readings. For each snapshot place:
seconds from the request to the checked version, and the memory that rank 0 needs beside its shard.
What came is compared bit by bit with content that the puller makes itself.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
from tests.gpu.weight_transfer import (
    EPOCH,
    SECRET,
    Notes,
    Puller,
    hardware,
    measure_plain,
    speed,
)

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

    def memory_bytes(self) -> int:
        """The most that was in use on the GPU since the last reset."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


def start_pullers(stand: Any) -> list[Puller]:
    """On the GPUs after the trainer's."""
    count = stand.args.pullers
    pullers = [Puller(stand, i, stand.args.ranks + i - 1) for i in range(1, count + 1)]
    for puller in pullers:
        puller.answer()
    return pullers


def measure_yardstick(args: argparse.Namespace) -> dict[str, Any]:
    """A plain broadcast of as many bytes from GPU 0, before the ranks have a group."""
    rows = trainer_rows(SHAPES[args.model])
    num_bytes = sum(2 * math.prod(shape) for _, _, shape in rows)  # bfloat16
    stand = SimpleNamespace(args=args, device=device_of(args.backend, 0), num_bytes=num_bytes)
    pullers = start_pullers(stand)
    plain = measure_plain(stand, pullers, args.repeats)
    for puller in pullers:
        puller.process.kill()
        puller.process.join()
    torch.cuda.empty_cache()
    return plain


def measure_place(stand: ShardedStand, place: str, repeats: int) -> dict[str, Any]:
    """All pullers pull each version at once; the first forms the group."""
    stand.serve_from(place)
    pullers = start_pullers(stand)
    snapshots, seconds, wrong, beside = [], [], [], 0
    for _ in range(repeats + 1):
        stand.fill()
        if stand.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(stand.device)
        before = stand.memory_bytes()
        stand.tell(do="follow")
        with stand.weights:
            started_s = time.monotonic()
            stand.server.retire(0)
            known = f"{stand.version:064x}"
            stand.server.publish(stand.version, stand.weights, known_hash=known)
            snapshots.append(time.monotonic() - started_s)
            for puller in pullers:
                puller.pull(stand.version)
            answers = [puller.answer() for puller in pullers]
            stand.server.before_change()
        beside = max(beside, stand.memory_bytes() - before)
        wrong += [answer for answer in answers if answer.get("wrong", ["?"])]
        seconds.append(max(answer.get("seconds", float("nan")) for answer in answers))
    for puller in pullers:
        puller.process.kill()
        puller.process.join()
    stand.server.close()
    return (
        speed(stand, seconds[1:])
        | {
            "first_pull_s": seconds[0],
            "snapshot_s": sorted(snapshots[1:])[len(snapshots[1:]) // 2],
            "rank_0_gb_beside_its_shard": beside
            / 1e9,  # a snapshot that was there before counts not
            "bit_equal": not wrong,
            "wrong": wrong[:2],
        }
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--model", choices=sorted(SHAPES), default="30b-a3b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pullers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    # NCCL reads it once a process, and the trainer's ranks use NCCL before our group does.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    plain = measure_yardstick(args)
    stand = ShardedStand(args)
    result: dict[str, Any] = {
        "hardware": hardware(),
        "torch": torch.__version__,
        "model": args.model,
        "num_bytes": stand.num_bytes,
        "ranks": args.ranks,
        "pullers": args.pullers,
        "plain": plain,
        "places": {},
    }
    for place in args.places:
        result["places"][place] = measure_place(stand, place, args.repeats)
        text = json.dumps(result, indent=1, default=str)
        if args.out:
            args.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    stand.tell(do="end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
