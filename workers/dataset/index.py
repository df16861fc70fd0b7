"""Where each row of a file of JSON lines begins, and what it is: an index beside the data.

One entry of 24 bytes a row and split, little-endian: offset in the file (int64), BLAKE2b-64 of the
line (uint64), line number from 1 (uint32), bytes of the line (uint32); and in a file beside it the
BLAKE2b-64 of the row's bare prompt (uint64), by which splits are compared. Entries are read one at
a time, so an index of any length costs no memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

ENTRY = np.dtype([("offset", "<i8"), ("digest", "<u8"), ("line", "<u4"), ("num_bytes", "<u4")])
PROMPT = np.dtype("<u8")
CHUNK = 1 << 18  # rows handled at a time

TRAIN, HELD_OUT = "train", "held_out"
_ROWS, _PROMPTS = "rows", "prompts"  # files of a split


class Entry(NamedTuple):
    """One row."""

    offset: int
    digest: int
    line: int
    num_bytes: int


def digest(content: bytes) -> int:
    """BLAKE2b-64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class SplitWriter:
    """Writes the entries of one split."""

    def __init__(self, folder: Path, split: str) -> None:
        self._entries: BinaryIO = (folder / f"{split}.{_ROWS}").open("wb")
        self._prompts: BinaryIO = (folder / f"{split}.{_PROMPTS}").open("wb")

    def append(self, entry: Entry, prompt: int) -> None:
        """One row."""
        self._entries.write(
            entry.offset.to_bytes(8, "little")
            + entry.digest.to_bytes(8, "little")
            + entry.line.to_bytes(4, "little")
            + entry.num_bytes.to_bytes(4, "little")
        )
        self._prompts.write(prompt.to_bytes(8, "little"))

    def extend(self, entries: npt.NDArray[np.void], prompts: npt.NDArray[np.uint64]) -> None:
        """Many."""
        self._entries.write(entries.tobytes())
        self._prompts.write(prompts.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entries.close()
        self._prompts.close()


class Split:
    """The entries of one split.

    Args:
        in_memory: read the files now, for they will go; else at each look.
    """

    def __init__(self, folder: Path, split: str, *, in_memory: bool) -> None:
        self._paths = {kind: folder / f"{split}.{kind}" for kind in (_ROWS, _PROMPTS)}
        self._held = {k: path.read_bytes() for k, path in self._paths.items()} if in_memory else {}
        num_bytes = len(self._held[_ROWS]) if in_memory else self._paths[_ROWS].stat().st_size
        self._num_rows = num_bytes // ENTRY.itemsize

    def __len__(self) -> int:
        return self._num_rows

    def entry(self, number: int) -> Entry:
        """Row `number` of the split, from 0."""
        if not 0 <= number < self._num_rows:
            raise IndexError(f"row {number} of a split of {self._num_rows}")
        found = np.frombuffer(self._read(_ROWS, ENTRY, number, 1), ENTRY)[0]
        return Entry(*(int(value) for value in found))

    def chunks(self) -> Iterator[tuple[npt.NDArray[np.void], npt.NDArray[np.uint64]]]:
        """All entries and digests of prompts, `CHUNK` rows at a time."""
        for first in range(0, self._num_rows, CHUNK):
            yield (
                np.frombuffer(self._read(_ROWS, ENTRY, first, CHUNK), ENTRY),
                np.frombuffer(self._read(_PROMPTS, PROMPT, first, CHUNK), PROMPT),
            )

    def prompt_chunks(self) -> Iterator[npt.NDArray[np.uint64]]:
        """Digests of all prompts, `CHUNK` rows at a time."""
        for first in range(0, self._num_rows, CHUNK):
            yield np.frombuffer(self._read(_PROMPTS, PROMPT, first, CHUNK), PROMPT)

    def prompts(self) -> npt.NDArray[np.uint64]:
        """Digests of all prompts at once, 8 bytes a row."""
        return np.frombuffer(self._read(_PROMPTS, PROMPT, 0, self._num_rows), PROMPT)

    def _read(self, kind: str, item: np.dtype[Any], first: int, count: int) -> bytes:
        start, size = first * item.itemsize, count * item.itemsize
        if self._held:
            return self._held[kind][start : start + size]
        with self._paths[kind].open("rb") as file:
            file.seek(start)
            return file.read(size)


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
