"""Memory that leaves a device and comes back in place, bit for bit, while tensors stay the same.

Whole storages are moved, so tied weights and views stay as they are; their addresses may change.
The host's copy is pinned, in pieces of a power of two (the allocator rounds each up to one), and
kept for the next time: pinning memory takes longer than copying it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

PIECE_BYTES = 1 << 28


class OffLoad:
    """Memory off-loaded from one device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pieces: list[Tensor] = []  # uint8 [PIECE_BYTES], in order
        self._away: list[tuple[torch.UntypedStorage, int]] = []  # and bytes

    def give_up(self, tensors: Iterable[Tensor]) -> int:
        """Move the storages of these tensors to the host; nothing may read them until `take_back`.

        Tensors elsewhere, and those in a file's memory, stay.

        Returns:
            Bytes that were moved.
        """
        assert not self._away, "given up already"
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device.type == self._device.type and tensor.untyped_storage().resizable()
        }
        self._away = [(s, s.nbytes()) for s in storages.values() if s.nbytes()]
        for here, there in self._pairs():
            there.copy_(here, non_blocking=True)
        self._settle()
        for storage, _ in self._away:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(size for _, size in self._away)

    def take_back(self) -> None:
        """Move all storages back in place; no effect, if none is away."""
        for storage, size in self._away:
            storage.resize_(size)
        for here, there in self._pairs():
            here.copy_(there, non_blocking=True)
        self._settle()
        self._away = []

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Equal stretches of bytes on the device and on the host."""
        at = 0
        for storage, size in self._away:
            here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                number, within = divmod(at, PIECE_BYTES)
                if number == len(self._pieces):
                    is_pinned = self._device.type == "cuda"
                    self._pieces.append(
                        torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
                    )
                length = min(PIECE_BYTES - within, size - start)
                yield here[start : start + length], self._pieces[number][within : within + length]
                start, at = start + length, at + length

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
