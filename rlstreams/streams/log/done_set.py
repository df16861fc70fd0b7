"""The done set: the finished records above a group's offset, as text in commit metadata.

Records finish out of order, but Kafka commits one offset. The offset is the low watermark
(everything below is done); the records done above it are listed in the metadata of the same commit,
so both advance in one transaction. Format: the letter `b`, then in base85 (Git's alphabet) a bitmap
from the watermark on, lowest bit first. Behind a space may stand `tries N`: how many owners of the
partition in a row began the oldest record that is not finished, the one that committed this
included (decision 0026).

Anybody may commit for a group, so what is read here is bounded.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.record import Committed

MAX_CHARACTERS = 4000  # brokers accept 4,096, and the client appends one
MAX_SPAN = 24_576  # offsets, behind which a partition pauses
_MOST = 25_000  # offsets that are named: 3,907 characters
UNREADABLE = "\ufffd"  # in place of metadata that is no text; never a done set
_TRIES = re.compile(r"tries ([0-9]{1,6})")


class DoneSetError(StreamsError):
    """Commit metadata that is not a done set."""


def encode_done(low: int, done: Iterable[int], tries: int = 0) -> str:
    """Return the offsets `done`, all at or above `low`, as metadata; "" for none and no tries.

    Offsets farther above than a pausing partition gets are left out: their records would be done
    again after a restart, and the first output counts.
    """
    offsets = np.fromiter(done, np.int64) - low
    assert not offsets.size or offsets.min() >= 0, f"done below the low watermark {low}"
    offsets = offsets[offsets < _MOST]
    text = ""
    if offsets.size:
        bits = np.zeros(int(offsets.max()) + 1, np.uint8)
        bits[offsets] = 1
        text = "b" + base64.b85encode(np.packbits(bits, bitorder="little").tobytes()).decode()
    return f"{text} tries {tries}" if tries else text


def decode_done(low: int, metadata: str) -> frozenset[int]:
    """Return the offsets at or above `low` that `metadata` names as done.

    Raises:
        DoneSetError: not written by `encode_done`.
    """
    if len(metadata) > MAX_CHARACTERS + 1:
        raise DoneSetError(f"commit metadata of {len(metadata)} characters is no done set")
    text = metadata.rstrip("\0").partition(" ")[0]
    if not text:
        return frozenset()
    try:
        data = base64.b85decode(text[1:])
    except ValueError as err:
        raise DoneSetError(f"commit metadata {metadata[:40]!r} is no done set: {err}") from err
    if text[0] != "b" or not data:
        raise DoneSetError(f"commit metadata {metadata[:40]!r} is no done set")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return frozenset((np.flatnonzero(bits) + low).tolist())


def tries_of(metadata: str) -> int:
    """Return the tries behind a done set; 0 where there are none, or for another program's text."""
    found = _TRIES.fullmatch(metadata.rstrip("\0").partition(" ")[2])
    return int(found[1]) if found else 0


def covered(committed: Committed | None, offset: int) -> bool:
    """Whether a group with this commit is done with `offset`."""
    if committed is None:
        return False
    return offset < committed.offset or offset in readable_done(committed)


@lru_cache(maxsize=256)
def readable_done(committed: Committed) -> frozenset[int]:
    """Return the done set of a commit; empty if its metadata is another program's."""
    try:
        return decode_done(committed.offset, committed.metadata)
    except DoneSetError:
        return frozenset()
