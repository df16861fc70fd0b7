"""Index of a file of JSON lines: place and kind of each row, as numpy arrays beside the data.

An entry of 32 bytes for each row that is not left out, and the numbers of the entries of each
split. Kept entries are mapped for one look at a time: pages that stay mapped count as memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ENTRY = np.dtype(
    [("offset", "<i8"), ("digest", "<u8"), ("prompt", "<u8"), ("line", "<u4"), ("num_bytes", "<u4")]
)


class Entry(NamedTuple):
    """One row."""

    offset: int  # in the file
    digest: int  # of the line
    prompt: int  # digest of the bare prompt, by which splits are compared
    line: int  # from 1
    num_bytes: int  # of the line


def digest(content: bytes) -> int:
    """BLAKE2b-64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The entries of one split.

    Args:
        rows: `ENTRY` of all rows, or the file that has them.
        numbers: which of them are of the split.
    """

    rows: npt.NDArray[np.void] | Path
    numbers: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.numbers)

    def entry(self, number: int) -> Entry:
        """Row `number` of the split, from 0."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of a split of {len(self)}")
        return Entry(*(int(value) for value in self._entries()[self.numbers[number]]))

    def prompts(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.uint64]:
        """Digests of the bare prompts of rows `first` to `end`."""
        found: npt.NDArray[np.uint64] = self._entries()[self.numbers[first:end]]["prompt"]
        return found

    def _entries(self) -> npt.NDArray[np.void]:
        if isinstance(self.rows, Path):
            return np.memmap(self.rows, ENTRY, mode="r")
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFacts:
    """What the first pass found."""

    content: str  # SHA-256 of the file
    num_read: int
    left_out: Mapping[str, int]  # rows by reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Of one file."""

    facts: IndexFacts
    train: Split
    held_out: Split | None
