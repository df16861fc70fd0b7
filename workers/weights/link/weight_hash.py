"""The hash of a version: of names, dtypes, shapes and bytes, by as many cores as there are.

SHA-256 over, for each tensor in name order, a line `["name","dtype",[shape]]` and the SHA-256 of
each 4 MiB of its row-major little-endian bytes, the last piece being what is left. One core does a
gigabyte or two of SHA-256 a second, and a step is not committed before its hash is known: so
pieces are hashed side by side, and those of a GPU are copied meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .hash_pieces import PIECE_BYTES, num_threads

_MAX_AHEAD = 64  # pieces under way: what is kept of tensors that their owner has let go


class WeightHash:
    """Over tensors in name order; none may change before `hexdigest` has returned.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._last = ""
        self._under_way: deque[Future[bytes] | bytes] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._staging = threading.local()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more tensor, on any device.

        Raises:
            ValueError: out of name order.
        """
        if self._last and name <= self._last:
            raise ValueError(f"tensor {name!r} came after {self._last!r}: not in name order")
        self._last = name
        row = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        self._under_way.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() > PIECE_BYTES:
            self._add_pieces(flat)
        elif flat.numel():
            self._under_way.append(_sha256(flat.cpu()))
        self._take(_MAX_AHEAD)

    def hexdigest(self) -> str:
        """64 hexadecimal digits, of what was added."""
        self._take(0)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        return self._digest.hexdigest()

    def _add_pieces(self, flat: torch.Tensor) -> None:
        if flat.is_cuda:  # other streams will read it
            torch.cuda.current_stream(flat.device).synchronize()
        for start in range(0, flat.numel(), PIECE_BYTES):
            self._take(_MAX_AHEAD)
            piece = flat[start : start + PIECE_BYTES]
            self._under_way.append(self._pool().submit(self._hash, piece))

    def _take(self, num_left: int) -> None:
        """Add up the oldest until so many are under way."""
        while len(self._under_way) > num_left:
            oldest = self._under_way.popleft()
            self._digest.update(oldest if isinstance(oldest, bytes) else oldest.result())

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(num_threads(), thread_name_prefix="weight-hash")
        return self._threads

    def _hash(self, piece: torch.Tensor) -> bytes:
        return _sha256(self._on_host(piece) if piece.is_cuda else piece)

    def _on_host(self, piece: torch.Tensor) -> torch.Tensor:
        """A copy in this thread's own page-locked buffer.

        By the default stream, behind what computed it: torch's other streams are few, and dealt out
        in turn, so one of "our own" may be that in which a broadcast waits for a receiver.
        """
        own = self._staging
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            own.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host: torch.Tensor = own.buffer[: piece.numel()]
        with torch.cuda.device(piece.device):
            host.copy_(piece, non_blocking=True)
            own.copied.record()
        own.copied.synchronize()
        return host


def hash_of(ordered: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The hash of pairs that are in name order."""
    digest = WeightHash()
    for name, tensor in ordered:
        digest.add(name, tensor)
    return digest.hexdigest()


def _sha256(piece: torch.Tensor) -> bytes:
    return hashlib.sha256(piece.numpy().data).digest()
