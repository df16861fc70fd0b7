"""The done set: which records above a group's offset are finished, as text in commit metadata.

Records finish out of order, but Kafka commits one offset. The offset is the low watermark
(everything below is done); the records done above it are listed in the metadata of the same commit,
so both advance in one transaction. Format: a letter, then base85 (Git's alphabet). Lower case is
plain, upper case deflated (RFC 1951, without a header); `b` is a bitmap from the watermark on,
lowest bit first, `r` alternating run lengths (not done first), each an Avro long. The
shortest of the four is used. Behind a space may stand `tries N`: how many owners of the partition
in a row began the oldest record that is not finished, the one that committed this included
(decision 0026).

Anybody may commit for a group, so what is read here is bounded before it is unpacked.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from rlstreams.schemas.varint import long_bytes, read_long
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.record import Committed

MAX_CHARACTERS = 4000  # brokers accept 4,096, and the client appends one
MAX_SPAN = 24_576  # a plain bitmap of this many offsets takes 3,841 characters
WIDEST = 1 << 18  # offsets; no writer reaches it, for a partition pauses at MAX_SPAN
UNREADABLE = "\ufffd"  # stands for metadata that is no text; never a done set
_TRIES = re.compile(r"tries ([0-9]{1,6})")


class DoneSetError(StreamsError):
    """Commit metadata that is not a done set, or a set too wide to be written."""


def encode_done(low: int, done: Iterable[int], tries: int = 0) -> str:
    """The offsets `done`, all at or above `low`, as metadata; "" for none and no tries.

    Raises:
        DoneSetError: longer than MAX_CHARACTERS; cannot happen within MAX_SPAN.
    """
    offsets = np.unique(np.fromiter(done, np.int64)) - low
    if offsets.size and offsets[0] < 0:
        raise DoneSetError(f"done offset {offsets[0] + low} is below the low watermark {low}")
    text = _shortest(offsets) if offsets.size else ""
    text = f"{text} tries {tries}" if tries else text
    if len(text) > MAX_CHARACTERS:
        raise DoneSetError(
            f"done set of {offsets.size} offsets from {low} on need {len(text)} characters, "
            f"at most {MAX_CHARACTERS} are accepted"
        )
    return text


def decode_done(low: int, metadata: str) -> frozenset[int]:
    """The offsets at or above `low` that `metadata` names as done.

    Raises:
        DoneSetError: not written by `encode_done`, or wider than WIDEST.
    """
    if len(metadata) > MAX_CHARACTERS + 1:
        raise DoneSetError(f"commit metadata of {len(metadata)} characters is no done set")
    text = metadata.rstrip("\0").partition(" ")[0]
    if not text:
        return frozenset()
    try:
        data = base64.b85decode(text[1:])
        if text[0].isupper():
            data = _inflate(data)
        if not data:
            raise ValueError("nothing behind the letter")  # noqa: TRY301
        if text[0] in "bB":
            if len(data) * 8 > WIDEST:
                raise ValueError(f"more than {WIDEST} offsets")  # noqa: TRY301
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            return frozenset((np.flatnonzero(bits) + low).tolist())
        if text[0] in "rR":
            return frozenset(_from_runs(low, data))
    except (ValueError, IndexError, zlib.error) as err:
        raise DoneSetError(f"commit metadata {metadata[:40]!r} is no done set: {err}") from err
    raise DoneSetError(f"commit metadata {metadata[:40]!r} is no done set")


def tries_of(metadata: str) -> int:
    """The tries behind a done set; 0 where there are none, or another's text."""
    found = _TRIES.fullmatch(metadata.rstrip("\0").partition(" ")[2])
    return int(found[1]) if found else 0


def covered(committed: Committed | None, offset: int) -> bool:
    """Whether a group that committed this is done with `offset`."""
    if committed is None:
        return False
    return offset < committed.offset or offset in readable_done(committed)


@lru_cache(maxsize=256)
def readable_done(committed: Committed) -> frozenset[int]:
    """The done set of a commit; none if its metadata is somebody else's."""
    try:
        return decode_done(committed.offset, committed.metadata)
    except DoneSetError:
        return frozenset()


def _shortest(offsets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """The shortest of the four forms; base85 keeps the order of lengths."""
    bits = np.zeros(int(offsets[-1]) + 1, np.uint8)
    bits[offsets] = 1
    bitmap = np.packbits(bits, bitorder="little").tobytes()
    edges = np.flatnonzero(np.diff(bits, prepend=0))
    runs = np.diff(np.concatenate(([0], edges, [bits.size])))
    varints = b"".join(long_bytes(n) for n in runs.tolist())
    forms = (("b", bitmap), ("B", _deflate(bitmap)), ("r", varints), ("R", _deflate(varints)))
    letter, data = min(forms, key=lambda form: len(form[1]))
    return letter + base64.b85encode(data).decode()


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _inflate(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    found = unpacker.decompress(data, WIDEST)  # a run of one offset takes a byte
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"more than {WIDEST} bytes, or cut short")
    return found


def _from_runs(low: int, data: bytes) -> Iterable[int]:
    view, i, offset, is_done = memoryview(data), 0, low, False
    while i < len(view):
        run, i = read_long(view, i)
        if not 0 <= run <= low + WIDEST - offset:
            raise ValueError(f"a run of {run} offsets")
        if is_done:
            yield from range(offset, offset + run)
        offset += run
        is_done = not is_done
