"""The order in which rows are trained on: a permutation for each epoch, keyed by the run's seed.

Rows are sorted by the raw output of a Philox generator, whose stream numpy promises to keep.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

_U64 = (1 << 64) - 1


class Order:
    """The row at each position of the endless training order."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self._seed = seed & _U64
        self._num_rows = num_rows
        self._epoch = -1
        self._rows: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)  # of the epoch, in its order

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and row at `position`, from 0."""
        epoch, place = divmod(position, self._num_rows)
        return epoch, int(self._of(epoch)[place])

    def after(self, epoch: int, rows: Collection[int]) -> int:
        """The position after the last one of `rows` in `epoch`; of no rows the epoch's first."""
        places = np.flatnonzero(np.isin(self._of(epoch), list(rows)))
        return epoch * self._num_rows + (int(places[-1]) + 1 if len(places) else 0)

    def _of(self, epoch: int) -> npt.NDArray[np.uint32]:
        if epoch != self._epoch:
            self._rows = permutation(self._seed, epoch, self._num_rows)
            self._epoch = epoch
        return self._rows


def permutation(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.uint32]:
    """The rows in the order of their noise, whose lowest bits give way to the row's number."""
    low = np.uint64((1 << max(num_rows - 1, 1).bit_length()) - 1)
    noise = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_rows)
    noise = noise & ~low | np.arange(num_rows, dtype=np.uint64)
    noise.sort()
    return (noise & low).astype(np.uint32)
