"""Torch's process group of the ranks: NCCL between GPUs, gloo over the loopback between CPUs.

The ranks meet in a file of a private folder: no port is open for it. Whoever hangs in a collective
of NCCL is freed by `abort`. Gloo knows no abort, and torch keeps a group in its caches: there the
rank that gives up shuts its connections down, which it knows by an address that is the group's own.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.engines.base import CPU
from workers.weights.link.interface import name_of

# The last resort: dead and stopped ranks are noticed, and named, long before.
COLLECTIVE_S = 1800.0
# What NCCL reads once a process: as the weight server's groups have it, and without multicast,
# which adds up in another order.
_ENVIRONMENT = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # A watchdog that tears the process down would end it before the rank at fault is named.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def join(file: Path, rank: int, size: int, device: str, host: str) -> DeviceMesh:
    """Meet the others; returns when all are there.

    Args:
        file: new for each group.
        device: `cpu` or `cuda`; a process sees one GPU.
        host: address of the interface over which NCCL's ranks find each other.
    """
    store = FileStore(str(file), size)
    timeout = timedelta(seconds=COLLECTIVE_S)
    if device == CPU:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_of(file))]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options
        )
    else:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name_of(host)}")
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    return init_device_mesh(device, (size,))


def address_of(file: Path) -> str:
    """Of the loopback; no other group of this machine is likely to have it. Elsewhere than on Linux
    there is only one."""
    if sys.platform != "linux":
        return "127.0.0.1"
    digest = hashlib.sha256(str(file).encode()).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def hang_up(file: Path) -> None:
    """Shut down this process's connections of a gloo group: whoever waits for us fails at once."""
    address = address_of(file)
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with end, contextlib.suppress(OSError):
            ends = end.family == socket.AF_INET and (end.getsockname()[0], end.getpeername()[0])
            if ends and address in ends:
                end.shutdown(socket.SHUT_RDWR)


def abort() -> None:
    """Free whoever hangs in a collective of NCCL. From any thread."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()


def leave(file: Path) -> None:
    """Let the group go that met at `file`; the caller holds nothing more that was made with it."""
    abort()
    hang_up(file)
    gc.collect()  # modules in shards refer to themselves, and to the group
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
