"""Step through the Avro bytes of many records at once, a field of all of them by a few numpy calls.

Python pays for each call and not for each record, so a batch of hundreds costs what a few records
would cost one by one. Nothing is refused on the way: a record whose bytes cannot be leads beyond
all ends, never back, so that where it ends tells whether it was read as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.tensor import Buffer

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
# Which of the positions at hand: all of them, or some.
Some = Numbers | slice

_ALL = slice(None)
_SPARE = bytes(16)  # what a step beyond the last record reads: lengths and counts of 0
_MANY = 1 << 12  # items of an array; more are not walked through: each is a round of calls
_FEW = 64  # items between two looks for records that cannot have so many
_SECOND = 2  # the byte of a union's second branch
_WORD_BYTES = 8
_LONG_BYTES, _LONG_BITS = 10, 64


def _zigzag(bits: Numbers) -> Numbers:
    return np.asarray((bits >> 1) ^ -(bits & 1), np.int64)


_ZIGZAG = _zigzag(np.arange(128))
# By a varint's first two bytes, the first one lower: its value and its size; size 0: more follow.
_LOW, _HIGH = np.arange(1 << 16) & 255, np.arange(1 << 16) >> 8
_PAIR_BYTES = np.where(_LOW < 128, 1, np.where(_HIGH < 128, 2, 0)).astype(np.int8)
_PAIR = _zigzag(np.where(_LOW < 128, _LOW, (_LOW & 127) | (_HIGH & 127) << 7)).astype(np.int16)
# By the first byte of a text: bytes with the length byte, or 0: longer, negative, or more follow.
_SHORT = np.array([1 + (z >> 1) if z < 128 and not z & 1 else 0 for z in range(256)], np.int64)

_CONTINUES = np.uint64(0x8080808080808080)  # bit of each byte of a varint but the last
_ONE = np.uint64(1)
# Neighbouring groups of 7, 14 and 28 bits are pushed together: (the upper ones, by how many bits).
_SQUEEZES = (
    (np.uint64(0x7F007F007F007F00), np.uint64(1)),
    (np.uint64(0x3FFF00003FFF0000), np.uint64(2)),
    (np.uint64(0x0FFFFFFF00000000), np.uint64(4)),
)


class Walk:
    """The bytes of a batch, at least one record.

    Args:
        values: records, one behind the other from then on.
    """

    def __init__(self, values: Sequence[Buffer]) -> None:
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        self.joined = b"".join((*values, _SPARE))
        self.ends: Numbers = np.cumsum(sizes)
        self.starts: Numbers = self.ends - sizes
        self._bytes: Bytes = np.frombuffer(self.joined, np.uint8)
        # The two, and the eight bytes from every position on, as one integer.
        self._last_word = len(self.joined) - _WORD_BYTES
        self._pairs = np.ndarray((self._last_word + 1,), "<u2", self.joined, strides=(1,))
        self._words = np.ndarray((self._last_word + 1,), "<u8", self.joined, strides=(1,))
        self._beyond = len(self.joined)

    def byte(self, at: Numbers) -> Bytes:
        """The byte at each position; of the spare ones where there is none."""
        found: Bytes = self._bytes.take(at, mode="clip")
        return found

    def long(self, at: Numbers) -> tuple[Numbers, Numbers]:
        """A zigzag varint at each position, and where each ends."""
        first = self.byte(at)
        if first.max() < 128:
            return _ZIGZAG.take(first), at + 1
        inside = np.minimum(at, self._last_word)
        pairs = self._pairs[inside]
        short = _PAIR_BYTES.take(pairs)
        if short.min() > 0:
            return _PAIR.take(pairs).astype(np.int64), at + short
        bits, sizes = _varint(self._words[inside])
        end = at + sizes
        for index in np.flatnonzero(sizes == 0).tolist():
            bits[index], end[index] = self._long_varint(int(at[index]))
        sign = (bits & _ONE).astype(np.int64)
        return (bits >> _ONE).astype(np.int64) ^ -sign, end

    def past_long(self, at: Numbers) -> Numbers:
        """Where each varint ends."""
        if self.byte(at).max() < 128:
            return at + 1
        return self.long(at)[1]

    def sized(self, at: Numbers) -> tuple[Numbers, Numbers]:
        """Where the bytes behind each length begin and end: those of a text or of a tensor."""
        sizes = _SHORT.take(self.byte(at))
        if sizes.min() > 0:
            return at + 1, at + sizes
        sizes, begin = self.long(at)
        end = begin + sizes
        if sizes.min() < 0 or sizes.max() > self._beyond:
            end[(sizes < 0) | (sizes > self._beyond)] = self._beyond
        return begin, end

    def past_sized(self, at: Numbers) -> Numbers:
        """Where each text ends."""
        sizes = _SHORT.take(self.byte(at))
        return at + sizes if sizes.min() > 0 else self.sized(at)[1]

    def optional(self, at: Numbers, pass_value: Callable[[Numbers, Some], Numbers]) -> Numbers:
        """Past a union of null and a value; `pass_value` is given those that have one."""
        branch, at = self.byte(at), at + 1
        has_value = branch == _SECOND
        odd = ~has_value & (branch != 0)
        if odd.any():
            at[odd] = self._beyond
        return _stepped(at, has_value, pass_value)

    def blocks(self, at: Numbers, pass_item: Callable[[Numbers, Some, int], Numbers]) -> Numbers:
        """Past an array or a map; `pass_item` is given those that have an n-th item, and n.

        Blocks that begin with their size in bytes (a negative count) lead beyond all ends.
        """
        counts, at = self.long(at)
        base = 0
        while True:
            if counts.min() < 0 or counts.max() > _MANY:
                odd = (counts < 0) | (counts > _MANY)
                at[odd], counts[odd] = self._beyond, 0
            largest = int(counts.max())
            if not largest:
                return at
            ends = self._ends(at) if largest > _FEW else None
            for number in range(largest):
                if ends is not None and number % _FEW == 0:
                    lost = (at > ends) | (counts - number > ends - at)
                    at[lost], counts[lost] = self._beyond, 0
                here = base + number
                at = _stepped(at, counts > number, lambda at, some: pass_item(at, some, here))  # noqa: B023
            base += largest
            if base > _MANY:
                at[counts > 0] = self._beyond
                return at
            if counts.min() > 0:
                counts, at = self.long(at)
            else:
                left = np.flatnonzero(counts)
                counts[left], at[left] = self.long(at[left])

    def _ends(self, at: Numbers) -> Numbers:
        """Where the record ends that holds each position."""
        records = np.searchsorted(self.ends, at, side="right")
        found: Numbers = self.ends[np.minimum(records, len(self.ends) - 1)]
        return found

    def _long_varint(self, at: int) -> tuple[int, int]:
        """One of nine or ten bytes."""
        bits = 0
        for index, byte in enumerate(self.joined[at : at + _LONG_BYTES]):
            bits |= (byte & 127) << 7 * index
            if byte < 128:
                return (bits, at + index + 1) if bits >> _LONG_BITS == 0 else (0, self._beyond)
        return 0, self._beyond


def _varint(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], Numbers]:
    """Bits and size of the varint that each word begins with; size 0: more than eight bytes."""
    ends = ~words & _CONTINUES
    below = (ends & -ends) - _ONE  # all bits below the one that says that no byte follows
    sizes = (np.bitwise_count(below).astype(np.int64) + 1) >> 3
    sizes[ends == 0] = 0
    bits = words & below & ~_CONTINUES
    for upper, by in _SQUEEZES:
        moved = bits & upper
        bits = (bits ^ moved) | moved >> by
    return bits, sizes


def _stepped(
    at: Numbers, chosen: npt.NDArray[np.bool_], step: Callable[[Numbers, Some], Numbers]
) -> Numbers:
    """Those that are chosen stepped on."""
    if chosen.all():
        return step(at, _ALL)
    which = np.flatnonzero(chosen)
    if len(which):
        at[which] = step(at[which], which)
    return at
