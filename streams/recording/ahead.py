"""Reads the next block of a file while the one before is used: decompression needs no GIL."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, wait

from rlstreams.streams.recording.container import Block


def read_ahead(pool: Executor, blocks: Iterator[Block]) -> Iterator[Block]:
    """The same blocks, each made by a thread of `pool` before it is asked for.

    Raises:
        DamagedError: as `blocks` does, after the blocks that are whole.
    """
    coming = pool.submit(next, blocks, None)
    try:
        while (block := coming.result()) is not None:
            coming = pool.submit(next, blocks, None)
            yield block
    finally:  # nobody reads the file any more when this has ended
        if not coming.cancel():
            wait([coming])
