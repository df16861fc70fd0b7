"""Copy of all that an optimizer step changes, made before the first of several updates: a later one
may fail, and then the step did not happen. Each rank keeps its own rows; nothing is gathered, and
frozen weights are not copied.
"""

from __future__ import annotations

import torch

from rlstreams.workers.model.base import CPU
from rlstreams.workers.trainer.learn.adam import Adam, Copies

ROOM_FACTOR = 1.25  # of a copy's bytes: the allocator rounds, and a step may need more than before


class Kept:
    """Parameters and their optimizer's state: on their device where steps leave room for a copy,
    else in pinned host memory, which the next step fills again."""

    def __init__(self, adam: Adam, device: torch.device) -> None:
        self._adam, self._device = adam, device
        self._copies: Copies = {}
        self._has_stepped = False

    def take(self) -> None:
        """Copy parameters and state."""
        self._copies = self._adam.copied(self.place(), self._copies)

    def go_back(self) -> None:
        """Restore parameters and state to the copy."""
        self._adam.restore(self._copies)
        self.let_go()

    def let_go(self) -> None:
        """End the step; no copy stays on a GPU."""
        self._has_stepped = True
        first = next((t for own in self._copies.values() for t in own.values()), None)
        if first is not None and first.device.type != CPU:
            self._copies = {}

    def place(self) -> torch.device:
        """Device for a copy; the host before this process's first step, whose peak is unknown."""
        host, device = torch.device(CPU), self._device
        if device.type == CPU or not self._has_stepped:
            return host
        unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_reserved(device)
        room = torch.cuda.mem_get_info(device)[0] + unused
        return device if room > ROOM_FACTOR * self._adam.num_bytes else host
