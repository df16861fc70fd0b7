"""What the wire gives: a plain broadcast by torch's own process group, from one buffer to another.

No names, no protocol, no checksum, one GiB at a time: the best case that a transfer is held to.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

CHUNK_BYTES = 2**30


def broadcast(
    *,
    num_bytes: int,
    rank: int,
    size: int,
    port: int,
    device: torch.device,
    backend: str,
    repeats: int,
) -> list[float]:
    """Seconds of each repeat, from a barrier until this rank has all bytes."""
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))  # type: ignore[attr-defined]
    here = device if device.type == "cuda" else None  # else torch takes GPU number `rank`
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=here)
    chunk = torch.empty(min(CHUNK_BYTES, num_bytes), dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats + 1):  # the first makes the communicator
        dist.barrier()
        _synchronize(device)
        started_s = time.monotonic()
        left = num_bytes
        while left:
            size_bytes = min(left, len(chunk))
            dist.broadcast(chunk[:size_bytes], 0)
            left -= size_bytes
        _synchronize(device)
        seconds.append(time.monotonic() - started_s)
    dist.destroy_process_group()
    return seconds[1:]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
