"""A process that pulls into its own parameters, as a model server does; told what to do by a pipe.

Every tensor's content follows from (version, name), so what came is compared bit by bit without
asking the sender. It can be told to kill or stop itself in the middle of a transfer.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.pieces import Piece
from rlstreams.workers.weights.link.receiver import Address, Receiver
from rlstreams.workers.weights.link.target import FreshTensors
from tests.gpu.model_rows import Row
from tests.gpu.yardstick import broadcast


def fill(tensor: torch.Tensor, version: int, name: str) -> None:
    """The content of `name` under `version`, made where the tensor lies."""
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(f"{version}/{name}".encode()))
    tensor.normal_(generator=generator)


def make(rows: Sequence[Row], device: torch.device, version: int) -> dict[str, torch.Tensor]:
    """The trainer's tensors under `version`."""
    tensors = {}
    for name, dtype, shape in rows:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        fill(tensors[name], version, name)
    return tensors


def expected(
    name: str, like: torch.Tensor, sources: Mapping[str, Row], version: int
) -> torch.Tensor:
    """What a server's parameter must hold: written down here once more, without the map."""
    parts = [name]
    if "qkv_proj" in name:
        parts = [name.replace("qkv_proj", f"{x}_proj") for x in "qkv"]
    elif "w13_weight" in name:
        parts = [name.replace("routed_experts.w13_weight", "gate_up_proj")]
    elif "w2_weight" in name:
        parts = [name.replace("routed_experts.w2_weight", "down_proj")]
    made = make([sources[part] for part in parts], like.device, version)
    return torch.cat(list(made.values()))


class MortalTensors(FreshTensors):
    """Parameters whose owner may send itself a signal when the n-th piece is about to come."""

    signal_at: tuple[int, int] | None = None  # pieces, signal
    _count = 0

    def begin(self, signal_at: tuple[int, int] | None) -> None:
        """Before a pull."""
        self.signal_at, self._count = signal_at, 0

    def took(self, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor]) -> None:
        """Count; die when the time has come."""
        self._count += len(pieces)
        if self.signal_at is not None and self._count >= self.signal_at[0]:
            number, self.signal_at = self.signal_at[1], None
            os.kill(os.getpid(), number)


def device_of(backend: str, index: int) -> torch.device:
    """GPU `index`, or the CPU."""
    if backend == "gloo":
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def run(pipe: Connection, backend: str, index: int, rows: list[Row], sources: list[Row]) -> None:
    """Obey until told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    device = device_of(backend, index)
    target = MortalTensors(rows, device)
    receiver: Receiver | None = None
    pipe.send({"ready": True})
    while (order := pipe.recv())["do"] != "end":
        if order["do"] == "plain":
            pipe.send({"seconds": broadcast(device=device, backend=backend, **order["plain"])})
            continue
        if receiver is None:
            receiver = Receiver(
                Address(**order["address"]), device, engine="puller", mode="in_place"
            )
        pipe.send(pull(order, receiver, target, sources))
    if receiver is not None:
        receiver.close()


def pull(
    order: dict[str, Any], receiver: Receiver, target: MortalTensors, sources: list[Row]
) -> dict[str, Any]:
    """One pull, timed as its worker would see it, and verified."""
    target.begin(order.get("signal_at"))
    started_s = time.monotonic()
    try:
        received = receiver.receive(order["version"], target, started_s + order["deadline_s"])
    except PullError as err:
        return {"error": f"{err.kind}: {err}", "seconds": time.monotonic() - started_s}
    seconds = time.monotonic() - started_s
    by_name = {row[0]: row for row in sources}
    wrong = []
    if order["verify"]:
        wrong = [
            name
            for name, tensor in target.tensors.items()
            if not torch.equal(tensor, expected(name, tensor, by_name, order["version"]))
        ]
    return {
        "seconds": seconds,
        "receive_s": received.receive_s,
        "join_s": received.join_s,
        "num_bytes": received.num_bytes,
        "checksum": received.checksum,
        "wrong": wrong,
    }
