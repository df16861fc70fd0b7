"""Torch's process group of the ranks: NCCL between GPUs, gloo between CPUs.

Ranks of one host meet in a file of a private folder, with gloo over the loopback: no port is open.
Those of several hosts meet in a store that rank 0 serves. `abort` frees a rank that hangs in a
collective of NCCL. Gloo knows no abort, and torch keeps a group in its caches: there the followers
shut their connections down (`hang_up`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlstreams.workers.compute.link import LOOPBACK, Meeting
from rlstreams.workers.model.base import CPU
from rlstreams.workers.weights.link.group import name_of

# Gloo's last resort; NCCL has none, see _ENVIRONMENT. Every command to all ranks has a deadline in
# `Team`, which notices and names dead and stopped ranks long before this one.
COLLECTIVE_S = 1800.0
MEET_S = 120.0  # on several hosts: until all ranks are there
_aborting = threading.Lock()
# Settings that NCCL reads once a process: as in the weight server's groups, and without multicast,
# which adds up in another order.
_ENVIRONMENT = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # A watchdog that tears the process down would end it before the rank at fault is named.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def serve(host: str) -> tuple[Store, int]:
    """A store on this address alone, and its port. It is served as long as the store is referenced,
    and answers any client that reaches it: torch has no key for it."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        host, port, None, True, timedelta(seconds=MEET_S), False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
    return store, port


def join(meeting: Meeting, rank: int, size: int, device: str, host: str) -> DeviceMesh:
    """Meet the others; returns when all are there.

    Args:
        device: `cpu` or `cuda`; a process sees one GPU.
        host: address of this rank's interface to the others, if they are on several hosts or GPUs.
    """
    store: Store
    if meeting.port:
        limit = timedelta(seconds=MEET_S)
        known = TCPStore(meeting.host, meeting.port, None, False, limit, False)
        store = PrefixStore(meeting.name, known)
        os.environ["GLOO_SOCKET_IFNAME"] = name_of(host)  # for megatron-core's own groups
    else:
        store = FileStore(meeting.name, size)
    timeout = timedelta(seconds=COLLECTIVE_S)
    if device == CPU:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=host if meeting.port else LOOPBACK)
        ]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options
        )
    else:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name_of(host)}")
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    return init_device_mesh(device, (size,))


def abort() -> None:
    """Free every thread that hangs in a collective of NCCL; callable from any thread."""
    with _aborting:
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # The freed thread may be at work on the same group's caches.
            with contextlib.suppress(RuntimeError, KeyError, ValueError, AssertionError):
                dist.distributed_c10d._abort_process_group()


def hang_up(but: object) -> None:
    """Free every rank that hangs in a collective of gloo with this process, which is a follower.

    Args:
        but: address of a peer to which the connection stays open.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo" or sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            end = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with end, contextlib.suppress(OSError):
            # A listening socket has no peer.
            if end.family == socket.AF_INET and end.getpeername() != but:
                end.shutdown(socket.SHUT_RDWR)


def leave() -> None:
    """Destroy the process group; the caller no longer holds anything that was made with it."""
    abort()
    gc.collect()  # modules in shards refer to themselves, and to the group
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
