"""Sees that the records of a file follow each other, and that its blocks are those of the index.

A block that is whole for itself may be missing, moved, or there twice. Offsets need not be dense:
transaction markers take some, and a recording may hold chosen records only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from rlstreams.streams.log.record import PART_HEADER, RawRecord
from rlstreams.streams.recording.container import Block
from rlstreams.streams.recording.errors import DamagedError
from rlstreams.streams.recording.index import KnownBlock


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

    def checked(self, block: Block, records: Iterable[RawRecord]) -> Iterator[RawRecord]:
        """The records of one more block.

        Raises:
            DamagedError: it is another block than the index knows, or goes back.
        """
        last, is_begun = self._last, self._known is None
        for raw in records:
            if not is_begun:
                self._check_block(block, raw.position.offset)
                is_begun = True
            offsets = raw.offsets
            end = offsets[-1]
            if end <= last or len(offsets) > 1:
                self._check_parts(block, raw, last)
                end = max(last, end)
            self._last = last = end
            yield raw

    def _check_block(self, block: Block, first: int) -> None:
        if self._known is not None and self._known.get(block.at) != (block.num_records, first):
            raise DamagedError(
                f"{self._where(block)} is not the one that was written there: blocks are missing "
                "or were moved",
                block.at,
            )

    def _check_parts(self, block: Block, raw: RawRecord, last: int) -> None:
        """A record of several parts, or one that is not behind the one before."""
        if not all(a < b for a, b in pairwise(raw.offsets)):
            raise DamagedError(
                f"{self._where(block)}: {raw.position} has {list(raw.offsets)} as offsets of its "
                "parts",
                block.at,
            )
        # A record is delivered with its last part, though its first may lie before others; a torn
        # one when nobody waited for the rest any more.
        if raw.offsets[-1] <= last and PART_HEADER not in raw.headers:
            raise DamagedError(
                f"{self._where(block)}: {raw.position} is not behind offset {last}", block.at
            )

    def _where(self, block: Block) -> str:
        return f"{self._name}: the block at byte {block.at}"


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
