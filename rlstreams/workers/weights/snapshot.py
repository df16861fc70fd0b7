"""A version as it is served: a copy of the trainer's weights that further training does not touch.

Places: `device`, next to the model; `pinned` host memory, staged to the device as it is sent;
`auto`, which is `device` where twice the copy fits. Memory of retired versions is reused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlstreams.workers.weights.layout import layout_of, size_bytes

if TYPE_CHECKING:
    import torch

    from rlstreams.workers.weights.link.pieces import Piece
    from rlstreams.workers.weights.link.shards import Part


class Snapshot:
    """Weights of one version."""

    def __init__(
        self, weight_hash: str, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self.weight_hash = weight_hash
        self.tensors = tensors
        self._device = device
        self.layout = layout_of(tensors)

    def bytes_of(self, piece: Piece, part: Part) -> torch.Tensor:
        """A piece as flat bytes on the device; a view where it is contiguous there already."""
        import torch

        tensor = part.cut(self.tensors[part.name])
        dtype = getattr(torch, piece.dtype)
        staged = tensor.to(device=self._device, dtype=dtype, non_blocking=True)
        return staged.contiguous().view(-1).view(torch.uint8)


class Snapshots:
    """The versions held. One thread publishes them, another sends them."""

    def __init__(self, device: torch.device, place: str) -> None:
        self._device = device
        self._place = place
        self._held: dict[int, Snapshot] = {}
        self._spare: list[Snapshot] = []
        self._leased: list[Snapshot] = []
        self._lock = threading.Lock()

    def take(
        self, policy_version: int, weight_hash: str, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the weights; returns when the copy is whole."""
        with self._lock:
            spare = self._spare.pop() if self._spare else None
        tensors = self._copy(weights, spare)
        with self._lock:
            self._held[policy_version] = Snapshot(weight_hash, tensors, self._device)

    def lease(self, policy_version: int) -> Snapshot | None:
        """A snapshot to send: its memory stays until `give_back`."""
        with self._lock:
            snapshot = self._held.get(policy_version)
            if snapshot is not None:
                self._leased.append(snapshot)
            return snapshot

    def give_back(self, snapshot: Snapshot) -> None:
        """Return a leased snapshot, which was sent."""
        with self._lock:
            self._leased.remove(snapshot)
            self._reuse(snapshot)

    def hash_of(self, policy_version: int) -> str | None:
        """Hash of the weights that were published as this version, or None."""
        with self._lock:
            snapshot = self._held.get(policy_version)
            return None if snapshot is None else snapshot.weight_hash

    def versions(self) -> list[int]:
        """Versions held, oldest first."""
        with self._lock:
            return sorted(self._held)

    def retire(self, keep: int) -> None:
        """Drop all but the newest `keep`."""
        with self._lock:
            for version in sorted(self._held)[: -keep or None]:
                self._reuse(self._held.pop(version))

    def _reuse(self, snapshot: Snapshot) -> None:
        if snapshot not in (*self._held.values(), *self._leased) and not self._spare:
            self._spare.append(snapshot)

    def _copy(
        self, weights: Mapping[str, torch.Tensor], spare: Snapshot | None
    ) -> dict[str, torch.Tensor]:
        import torch

        place = self._resolved(weights)
        old = {} if spare is None else spare.tensors
        copies = {}
        for name, tensor in weights.items():
            room = old.get(name)
            if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
                pinned = place == "pinned"
                device = torch.device("cpu") if pinned else self._device
                room = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned
                )
            copies[name] = room.copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def _resolved(self, weights: Mapping[str, torch.Tensor]) -> str:
        """The place of copies, decided once: a version's size does not change."""
        import torch

        if self._place == "auto":
            fits = True
            if self._device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(self._device)
                fits = 2 * size_bytes(weights) < free
            self._place = "device" if fits else "pinned"
        return "device" if self._device.type == "cpu" else self._place
