"""A process group of one sender and its receivers, outside torch's default one.

Rank 0 sends. Gloo's bytes to or from a GPU go through host memory. A waiting thread polls
`Pending.done()` between looks at its link and its clock, so no call here blocks for a dead peer;
`abort` frees a group that hangs. After an abort torch calls the work completed: only a checksum
proves that bytes came. Gloo knows no abort: each of its operations ends by a timeout of its own,
and a group is released when they have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .errors import PullError

# A watchdog that tears the process down would end trainer and server with a dead peer.
_LOOK_EVERY_S = 0.002
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def gpu_of(device: torch.device) -> str:
    """The GPU's own name, the same in every process that sees it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


class Pending:
    """A batch under way."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        event: torch.cuda.Event | None,
        staged: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Args: staged: pairs of received host memory and the device memory to copy it to."""
        self._works = list(works)
        self._event = event
        self._staged = list(staged)

    def done(self) -> bool:
        """Whether the batch ended; never waits.

        Raises:
            PullError: a peer broke off.
        """
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        while self._works and self._works[0].is_completed():
            try:
                self._works.pop(0).wait()
            except RuntimeError as err:
                raise PullError("link", f"a peer broke off: {err}") from err
        if self._works:
            return False
        while self._staged:
            host, target = self._staged.pop()
            target.copy_(host)  # waits for the copy: checksums are made on another stream
        return True


class TransferGroup:
    """One formed group."""

    def __init__(self, backend: str, device: torch.device, *, stall_s: float) -> None:
        """
        Args:
            stall_s: time after which a gloo operation fails by itself.
        """
        self._device = device
        self._backend = backend
        self._stall = timedelta(seconds=stall_s)
        self._group: Any = None  # the stubs know no backend by its methods
        self._rank = 0

    def form(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        until_s: float,
        look: Callable[[], None],
    ) -> None:
        """Meet the others. Runs in a thread of its own, because neither transport can be
        interrupted.

        Args:
            host: address of the interface that the group may use.
            until_s: on the monotonic clock.
            look: called while waiting; an exception from it ends the wait.

        Raises:
            PullError: the group did not form in time, or a member broke off.
        """
        failed: list[Exception] = []
        deadline_s = until_s - time.monotonic()

        def run() -> None:
            try:
                self._make(store, rank, size, host, deadline_s)
            except (RuntimeError, PullError, ValueError, OSError) as err:
                failed.append(err)

        thread = threading.Thread(target=run, name="form-group", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                look()
                if time.monotonic() > until_s:
                    failed.append(TimeoutError(f"not within {deadline_s:g} s"))
                    break
                thread.join(_LOOK_EVERY_S)
        except BaseException:
            self.abort()
            raise
        if failed:
            self.abort()
            raise PullError("link", f"the group did not form: {failed[0]}") from failed[0]

    def _make(self, store: Store, rank: int, size: int, host: str, deadline_s: float) -> None:
        timeout = timedelta(seconds=deadline_s)
        self._rank = rank
        # Torch calls it while the group lives, and keeps only its C++ half.
        self._store = store
        if self._backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
            return
        with torch.cuda.device(self._device), _environment(_NCCL_ENVIRONMENT):
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as vLLM and SGLang set it
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name_of(host)}")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            nccl.is_high_priority_stream = True  # checksums run beside it, and must not delay it
            self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            # The first collective makes the communicator.
            first = self.broadcast([torch.zeros(1, dtype=torch.uint8, device=self._device)])
            until_s = time.monotonic() + deadline_s
            while not first.done() and time.monotonic() < until_s:
                time.sleep(0.001)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, root: int = 0) -> Pending:
        """Send (rank `root`) or receive one batch of flat uint8 tensors, on the current stream."""
        group = self._group
        if group is None:
            raise PullError("link", "the group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank = root
        try:
            if self._backend == "gloo":
                options.timeout = self._stall
                hosts = self._on_host(tensors)
                works = [group.broadcast([host], options) for host in hosts]
                if hosts is tensors or self._rank == 0:
                    return Pending(works, None)
                return Pending(works, None, list(zip(hosts, tensors, strict=True)))
            group._start_coalescing()
            for tensor in tensors:
                group.broadcast([tensor], options)
            group._end_coalescing().wait()  # the stream waits, not this thread
        except RuntimeError as err:
            raise PullError("link", f"a peer broke off: {err}") from err
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Pending([], event)

    def _on_host(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Host memory that gloo moves: a GPU's tensors get as much of it, filled on the sender."""
        if self._device.type == "cpu":
            return tensors
        is_pinned = torch.cuda.is_available()
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=is_pinned) for t in tensors]
        if self._rank == 0:
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor)
        return hosts

    def abort(self) -> None:
        """Abandon the group; idempotent. A hung NCCL kernel ends within a second."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._backend == "gloo":
            # Its destructor would wait for hung operations, and hold the interpreter meanwhile.
            let_go = threading.Timer(self._stall.total_seconds() + 1.0, lambda _: None, [group])
            let_go.daemon = True
            let_go.start()
            return
        with contextlib.suppress(RuntimeError):
            group.abort()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables while a group is made: the process's other groups keep their values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def name_of(host: str) -> str:
    """The network interface that has an address: `lo` for 127.0.0.1.

    Raises:
        ValueError: no interface has it, or it is no IPv4 address.
    """
    try:
        wanted = socket.inet_aton(socket.gethostbyname(host))
    except OSError as err:
        raise ValueError(f"{host} is no IPv4 address, nor the name of one: {err}") from err
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            found = answer[20:24]
            if found == wanted or found[:1] == wanted[:1] == b"\x7f":  # 127/8 is one interface's
                return name
    raise ValueError(f"no network interface has the address {host}")
