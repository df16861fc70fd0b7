"""In which order rows are trained on: a permutation for each epoch, keyed by the run's seed.

Up to 2^20 rows it is a sorted one: rows by the raw output of a Philox generator, whose stream numpy
promises to keep. Beyond, a Feistel network over the row numbers gives each position by itself, so
that ten million rows cost no memory. Which of the two is a matter of the number of rows alone, and
so of the data set's hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

SORTED_ROWS = 1 << 20
_U64 = (1 << 64) - 1
_ROUNDS = 6


class _Permutation(Protocol):
    """A bijection of 0 .. n - 1."""

    def row(self, index: int) -> int:
        """What stands at `index`."""

    def index(self, row: int) -> int:
        """Where `row` stands."""


class Order:
    """Which row stands at which position of the endless training order."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self._seed = seed
        self._num_rows = num_rows
        self._epoch = -1
        self._permutation: _Permutation | None = None

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and row at `position`, from 0."""
        epoch, index = divmod(position, self._num_rows)
        return epoch, self._of(epoch).row(index)

    def position(self, epoch: int, row: int) -> int:
        """Where `row` stands in `epoch`."""
        return epoch * self._num_rows + self._of(epoch).index(row)

    def after(self, epoch: int, rows: Collection[int]) -> int:
        """The position behind the last one of `rows` in `epoch`; of no rows the epoch's first."""
        permutation = self._of(epoch)
        last = max((permutation.index(row) for row in rows), default=-1)
        return epoch * self._num_rows + last + 1

    def _of(self, epoch: int) -> _Permutation:
        if self._permutation is None or epoch != self._epoch:
            kind = _Sorted if self._num_rows <= SORTED_ROWS else _Feistel
            self._permutation = kind(self._seed & _U64, epoch, self._num_rows)
            self._epoch = epoch
        return self._permutation


class _Sorted:
    """Rows in the order of their noise."""

    def __init__(self, seed: int, epoch: int, num_rows: int) -> None:
        noise = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_rows)
        self._rows = np.argsort(noise, kind="stable")
        self._indices: npt.NDArray[np.intp] | None = None

    def row(self, index: int) -> int:
        return int(self._rows[index])

    def index(self, row: int) -> int:
        if self._indices is None:
            self._indices = np.argsort(self._rows, kind="stable")
        return int(self._indices[row])


class _Feistel:
    """A balanced Feistel network over the next power of four, walked until it is in range.

    Luby and Rackoff (1988): four rounds of a keyed random function are a pseudorandom permutation;
    the walk keeps it one on the smaller set, and takes at most four steps on average.
    """

    def __init__(self, seed: int, epoch: int, num_rows: int) -> None:
        self._key = seed.to_bytes(8, "big") + epoch.to_bytes(8, "big")
        self._num_rows = num_rows
        self._half = (max(num_rows - 1, 1).bit_length() + 1) // 2  # bits
        self._mask = (1 << self._half) - 1

    def row(self, index: int) -> int:
        while True:
            left, right = index >> self._half, index & self._mask
            for number in range(_ROUNDS):
                left, right = right, left ^ self._noise(number, right)
            index = left << self._half | right
            if index < self._num_rows:
                return index

    def index(self, row: int) -> int:
        while True:
            left, right = row >> self._half, row & self._mask
            for number in reversed(range(_ROUNDS)):
                left, right = right ^ self._noise(number, left), left
            row = left << self._half | right
            if row < self._num_rows:
                return row

    def _noise(self, number: int, half: int) -> int:
        text = number.to_bytes(1, "big") + half.to_bytes(8, "big")
        digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") & self._mask
