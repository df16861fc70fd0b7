"""A group of a sender and one receiver on the same GPU: bytes cross in a window of device memory.

CUDA IPC gives the receiver the sender's window (as `torch.multiprocessing.reductions` shares it):
pieces are copied into it and out of it on the card. The two sides hand the window to each other by
one byte each way over a gloo group. The window is made once a process: memory that a dead receiver
had open cannot be freed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from .errors import PullError
from .group import Pending, TransferGroup

IPC = "ipc"
WINDOW_BYTES = 2**28
_KEY = "window"  # in the store
_windows: dict[torch.device, torch.Tensor] = {}
Run = tuple[torch.Tensor, torch.Tensor]  # equally many bytes of the window and of a piece


def make_group(backend: str, device: torch.device, *, stall_s: float) -> TransferGroup | IpcGroup:
    """A group that is not formed yet."""
    if backend == IPC:
        return IpcGroup(device, stall_s=stall_s)
    return TransferGroup(backend, device, stall_s=stall_s)


class IpcGroup:
    """One formed group of two; see `TransferGroup`."""

    def __init__(self, device: torch.device, *, stall_s: float) -> None:
        self._device = device
        self._signals = TransferGroup("gloo", torch.device("cpu"), stall_s=stall_s)
        self._is_sender = False
        self._window = torch.empty(0)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

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
        """Meet the other, and share the window; see `TransferGroup.form`.

        Raises:
            PullError: also where CUDA IPC is not available.
        """
        self._is_sender = rank == 0
        try:
            if self._is_sender:
                self._window = window_of(self._device)
                store.set(_KEY, exported(self._window))
            else:
                self._window = opened(store.get(_KEY).decode(), self._device)
        except (RuntimeError, ValueError, OSError) as err:
            raise PullError("link", f"CUDA IPC cannot be had: {err}") from err
        self._signals.form(store, rank, size, host=host, until_s=until_s, look=look)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Crossing:
        """Send (rank 0) or receive one batch; each `Crossing.done` advances it."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return Crossing(self._steps(tensors, ready))

    def abort(self) -> None:
        """Abandon the group; idempotent."""
        self._signals.abort()
        self._window = torch.empty(0)

    def _steps(
        self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> Iterator[None]:
        for runs in _runs(self._window, tensors):
            if not self._is_sender:
                yield from _until(self._signal(root=0))
            copied = self._copied(runs, ready)
            while copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                yield
            if self._is_sender:
                yield from _until(self._signal(root=0))
            yield from _until(self._signal(root=1))

    def _signal(self, *, root: int) -> Pending:
        return self._signals.broadcast([torch.zeros(1, dtype=torch.uint8)], root=root)

    def _copied(
        self, runs: Sequence[Run], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        pairs = runs if self._is_sender else [(piece, window) for window, piece in runs]
        if self._stream is None or ready is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return copied


class Crossing:
    """A batch under way; see `Pending`."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps

    def done(self) -> bool:
        """Advance without waiting; whether the batch has ended. For the oldest batch only."""
        return next(self._steps, self) is self


def _until(pending: Pending) -> Iterator[None]:
    while not pending.done():
        yield


def _runs(window: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[list[Run]]:
    """Runs of the pieces, flat uint8, by window: equal on both sides."""
    runs: list[Run] = []
    filled = 0
    for piece in pieces:
        start = 0
        while start < piece.numel():
            size = min(window.numel() - filled, piece.numel() - start)
            runs.append((window[filled : filled + size], piece[start : start + size]))
            start, filled = start + size, filled + size
            if filled == window.numel():
                yield runs
                runs, filled = [], 0
    if runs:
        yield runs


def window_of(device: torch.device) -> torch.Tensor:
    """This process's window on a device."""
    if device not in _windows:
        _windows[device] = torch.empty(WINDOW_BYTES, dtype=torch.uint8, device=device)
    return _windows[device]


def exported(window: torch.Tensor) -> str:
    """JSON by which another process opens the window: plain fields for `rebuild_cuda_tensor`."""
    from torch.multiprocessing.reductions import reduce_tensor

    fields = reduce_tensor(window)[1]  # type: ignore[no-untyped-call]
    plain = [fields[3], *fields[7:10], *fields[11:]]
    return json.dumps([{"b64": _text(it)} if isinstance(it, bytes) else it for it in plain])


def opened(text: str, device: torch.device) -> torch.Tensor:
    """The sender's window, in this process."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    plain: list[Any] = [
        base64.b64decode(it["b64"]) if isinstance(it, dict) else it for it in json.loads(text)
    ]
    offset, handle, size, start, *rest = plain
    index = torch.cuda.current_device() if device.index is None else device.index
    shape, stride, storage = (WINDOW_BYTES,), (1,), torch.TypedStorage
    fields = [torch.Tensor, shape, stride, offset, storage, torch.uint8, index, handle, size, start]
    fields += [False, *rest]
    found: torch.Tensor = rebuild_cuda_tensor(*fields)  # type: ignore[no-untyped-call]
    return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
