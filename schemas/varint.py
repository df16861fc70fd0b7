"""Avro's integers: zigzag, then seven bits a byte, lowest first (specification 1.12, "Binary")."""

from __future__ import annotations

from operator import index

from rlstreams.schemas.tensor import Buffer

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower
_PAIR = 1 << 14  # two bytes hold less than this


def long_bytes(n: int) -> bytes:
    """An Avro `long`.

    Raises:
        TypeError: not an integer.
        ValueError: it needs more than 64 bits.
    """
    n = index(n)
    if not -(1 << 63) <= n < 1 << 63:
        raise ValueError(f"{n} does not fit into 64 bits")
    return _unsigned_bytes((n << 1) ^ (n >> 63))


def _unsigned_bytes(z: int) -> bytes:
    out = bytearray()
    while z > 0x7F:
        out.append((z & 0x7F) | 0x80)
        z >>= 7
    out.append(z)
    return bytes(out)


def time_bytes(ms: int) -> bytes:
    """`long_bytes` for a wall clock in milliseconds, whose upper part changes every 8 seconds."""
    if type(ms) is int and _PAIR < ms < 1 << 62:
        return FIRST_TWO[ms << 1 & _PAIR - 1] + UPPER_BYTES[ms >> 13]
    return long_bytes(ms)


class _FirstTwo(dict[int, bytes]):
    """Fourteen bits as two bytes that more bytes follow."""

    def __missing__(self, z: int) -> bytes:
        self[z] = bytes((z & 127 | 128, z >> 7 | 128))
        return self[z]


class _UpperBytes(dict[int, bytes]):
    """What follows the first two bytes."""

    def __missing__(self, z: int) -> bytes:
        if len(self) >= _TABLE_ENTRIES:
            self.clear()
        self[z] = _unsigned_bytes(z)
        return self[z]


# Only `time_bytes` adds to the second: what it holds belongs to times of more than two bytes.
FIRST_TWO, UPPER_BYTES = _FirstTwo(), _UpperBytes()

# A wall clock in milliseconds has six bytes until 2039. It is the sum of what its first two bytes
# and its last four say; a sum below 0 is none, and `read_long` is to be asked.
_NO_TIME = -(1 << 70)


class _Lower(dict[bytes, int]):
    """The first two bytes of an even integer that goes on."""

    def __missing__(self, two: bytes) -> int:
        if len(two) != 2 or min(two) < 128 or two[0] & 1:
            return _NO_TIME
        self[two] = (two[0] & 127 | (two[1] & 127) << 7) >> 1
        return self[two]


class _Upper(dict[bytes, int]):
    """The last four bytes of an integer of six."""

    def __missing__(self, four: bytes) -> int:
        if len(four) != 4 or min(four[:3]) < 128 or four[3] > 127:
            return _NO_TIME
        if len(self) >= _TABLE_ENTRIES:
            self.clear()
        z = sum((byte & 127) << shift for byte, shift in zip(four, (14, 21, 28, 35), strict=True))
        self[four] = z >> 1
        return self[four]


TIME_LOWER, TIME_UPPER = _Lower(), _Upper()


class _FirstTwoBytes(dict[int, int]):
    """The same by an unsigned integer of two bytes, the lower one first."""

    def __missing__(self, two: int) -> int:
        self[two] = value = TIME_LOWER[two.to_bytes(2, "little")]
        return value


class _LastFourBytes(dict[int, int]):
    """The same by one of four bytes."""

    def __missing__(self, four: int) -> int:
        if len(self) >= _TABLE_ENTRIES:
            self.clear()
        self[four] = value = TIME_UPPER[four.to_bytes(4, "little")]
        return value


FIRST_TWO_BYTES, LAST_FOUR_BYTES = _FirstTwoBytes(), _LastFourBytes()


def is_clock(ms: int) -> bool:
    """Whether a `long` takes six bytes and is positive, as times from 2514 days on do to 2039."""
    return 1 << 34 <= ms < 1 << 41


def read_long(buf: Buffer, i: int) -> tuple[int, int]:
    """An Avro `long` at `i`: its value and where it ends.

    Raises:
        IndexError: the buffer ends first.
        ValueError: more than 64 bits.
    """
    # Up to two bytes without a loop; the constant takes the continuation bit off again.
    z = buf[i]
    if z < 128:
        return (z >> 1) ^ -(z & 1), i + 1
    z += (buf[i + 1] << 7) - 128
    if z < 1 << 14:
        return (z >> 1) ^ -(z & 1), i + 2
    z, i = read_unsigned(buf, i + 2, z - (1 << 14), 14)
    return (z >> 1) ^ -(z & 1), i


def read_unsigned(buf: Buffer, i: int, z: int, shift: int) -> tuple[int, int]:
    """What follows `z`, the lowest `shift` bits of an unsigned integer; errors of `read_long`."""
    while shift < 64:
        byte = buf[i]
        i += 1
        if byte < 128:
            z |= byte << shift
            if z >> 64:
                break
            return z, i
        z |= (byte & 127) << shift
        shift += 7
    raise ValueError(f"integer before byte {i} is longer than 64 bits")


def read_length(buf: Buffer, i: int) -> tuple[int, int]:
    """A length at `i`, checked against what is left."""
    n, i = read_long(buf, i)
    if not 0 <= n <= len(buf) - i:
        raise ValueError(f"length {n} at byte {i}, but {len(buf) - i} bytes are left")
    return n, i


def read_count(buf: Buffer, i: int) -> tuple[int, int]:
    """The item count of an array or map block at `i`; a negative one carries a byte size.

    Every item takes a byte at least, so a corrupt count cannot ask for more than is there.
    """
    n, i = read_long(buf, i)
    if n < 0:
        _, i = read_long(buf, i)
        n = -n
    if n > len(buf) - i:
        raise ValueError(f"{n} items at byte {i}, but {len(buf) - i} bytes are left")
    return n, i
