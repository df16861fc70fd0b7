"""Kafka's murmur2 partitioner: each bus chooses the same partition for a key; readers find it."""

from __future__ import annotations

from functools import lru_cache

_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """Austin Appleby's MurmurHash2, 32 bits, with the seed of Kafka's Java client."""
    length = len(key)
    h = (_SEED ^ length) & _MASK
    whole = length - length % 4
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * _FACTOR & _MASK
        k = (k ^ k >> 24) * _FACTOR & _MASK
        h = h * _FACTOR & _MASK ^ k
    if tail := key[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * _FACTOR & _MASK
    h = (h ^ h >> 13) * _FACTOR & _MASK
    return h ^ h >> 15


@lru_cache(maxsize=8192)  # the samples of a group have one key
def partition_of(key: bytes, num_partitions: int) -> int:
    """Return the partition that a key goes to."""
    return (murmur2(key) & 0x7FFFFFFF) % num_partitions
