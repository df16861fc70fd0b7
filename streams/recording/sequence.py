"""Sees that the records of a file follow each other, and that its blocks are those of the index.

A block that is whole for itself may be missing, moved, or there twice. Offsets need not be dense:
transaction markers take some, and a recording may hold chosen records only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from streams.record import PART_HEADER, RawRecord
from streams.recording.container import Block
from streams.recording.errors import DamagedError
from streams.recording.index import KnownBlock


class Follower:
    """Looks at the blocks of one file, in order.

    Args:
        name: of the file, for messages.
        known: blocks by the byte at which they begin; None: the index was made from the file.
    """

    def __init__(self, name: str, known: Mapping[int, KnownBlock] | None) -> None:
        self._name = name
        self._known = known
        self._last = -1  # offset of the last part of the record before

    def check(self, block: Block, records: Sequence[RawRecord]) -> None:
        """One more block.

        Raises:
            DamagedError: it is another block than the index knows, or goes back.
        """
        where = f"{self._name}: the block at byte {block.at}"
        for raw in records:
            offsets = raw.offsets
            if len(offsets) > 1 and not all(a < b for a, b in pairwise(offsets)):
                raise DamagedError(
                    f"{where}: {raw.position} has {list(offsets)} as offsets of its parts", block.at
                )
            if PART_HEADER in raw.headers:  # torn: delivered when nobody waited for the rest
                continue
            # A record is delivered with its last part; its first may lie before others.
            if offsets[-1] <= self._last:
                raise DamagedError(
                    f"{where}: {raw.position} is not behind offset {self._last}", block.at
                )
            self._last = offsets[-1]
        if self._known is None:
            return
        known = self._known.get(block.at)
        first = min(raw.position.offset for raw in records)
        if known is None or known != (len(records), first):
            raise DamagedError(
                f"{where} is not the one that was written there: blocks are missing or were moved",
                block.at,
            )


def distinct(records: Iterable[RawRecord]) -> Iterator[RawRecord]:
    """Records of one partition out of several files.

    Raises:
        DamagedError: two have the same offset.
    """
    before = None
    for raw in records:
        if raw.position == before:
            raise DamagedError(f"{raw.position} is there twice, in two files of its partition")
        before = raw.position
        yield raw
