"""Avro's integers: zigzag, then seven bits a byte, lowest first (specification 1.12, "Binary")."""

from __future__ import annotations

from operator import index

from rlstreams.schemas.tensor import Buffer

_SHIFTS = range(14, 70, 7)  # ten bytes hold 64 bits


def long_bytes(n: int) -> bytes:
    """An Avro `long`.

    Raises:
        TypeError: not an integer.
        ValueError: it needs more than 64 bits.
    """
    n = index(n)
    if not -(1 << 63) <= n < 1 << 63:
        raise ValueError(f"{n} does not fit into 64 bits")
    z = (n << 1) ^ (n >> 63)
    out = bytearray()
    while z > 0x7F:
        out.append((z & 0x7F) | 0x80)
        z >>= 7
    out.append(z)
    return bytes(out)


def read_long(buf: Buffer, i: int) -> tuple[int, int]:
    """An Avro `long` at `i`: its value and where it ends.

    Raises:
        IndexError: the buffer ends first.
        ValueError: more than 64 bits.
    """
    z = buf[i]
    if z < 128:
        return (z >> 1) ^ -(z & 1), i + 1
    z += (buf[i + 1] << 7) - 128
    if z < 1 << 14:
        return (z >> 1) ^ -(z & 1), i + 2
    z -= 1 << 14
    i += 2
    for shift in _SHIFTS:
        byte = buf[i]
        i += 1
        if byte < 128:
            z |= byte << shift
            if z >> 64:
                break
            return (z >> 1) ^ -(z & 1), i
        z |= (byte & 127) << shift
    raise ValueError(f"integer before byte {i} is longer than 64 bits")


def read_length(buf: Buffer, i: int) -> tuple[int, int]:
    """Return the length of a text or of bytes at `i`, and where the length ends.

    Raises as `read_long`, and ValueError for a length that the buffer has no bytes for.
    """
    n, i = read_long(buf, i)
    if not 0 <= n <= len(buf) - i:
        raise ValueError(f"length {n} at byte {i}, but {len(buf) - i} bytes are left")
    return n, i


def read_count(buf: Buffer, i: int) -> tuple[int, int]:
    """Return the item count of an array or map block at `i`; a negative one carries a byte size.

    Raises as `read_long`, and ValueError for more items than bytes left (each takes one or more).
    """
    n, i = read_long(buf, i)
    if n < 0:
        _, i = read_long(buf, i)
        n = -n
    if n > len(buf) - i:
        raise ValueError(f"{n} items at byte {i}, but {len(buf) - i} bytes are left")
    return n, i
