"""Runs of steady fields: what stands in a record as it stood in an earlier one is found at once.

A run is a row of neighbouring leaves that take few values (`STEADY`, union branches, counts). Equal
bytes at the same place of the schema have equal values and end at the same place, so one look-up of
the bytes replaces reading them field by field. The lengths of earlier runs, by their first byte,
say which bytes to try.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rlstreams.schemas.varint import read_count, read_length, read_long

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower

# Fields with few values in a run, whatever its size: no times, no counters of samples. Only speed
# hangs on this list.
STEADY = frozenset(
    {
        *(
            "sample",
            "attempt",
            "group_size",
            "purpose",
            "dataset_epoch",
            "replacement",
            "author",
            "anchor",
        ),
        *("policy_version", "weight_hash", "load_id", "temperature", "top_p", "top_k"),
        *("finish_reason", "dtype", "engine", "worker", "instance"),
        *("prompt_partition", "trajectory_partition"),
    }
)
_RUN_BYTES = 512  # longer runs are not kept
_RUN_SIZES = 4  # lengths of earlier runs that are tried

Runs = dict[bytes, tuple[object, ...]]  # a run's bytes -> the values of its fields
SizesByByte = list[
    list[int]
]  # by the first byte of a run: how long such runs were, the latest first


def run_tables() -> tuple[Runs, SizesByByte]:
    """For one place of a schema, empty."""
    return {}, [[] for _ in range(256)]


def keep(
    runs: Runs, sizes: SizesByByte, b: bytes, start: int, end: int, values: tuple[object, ...]
) -> None:
    """Remember what `b[start:end]` says, unless the record was cut within it."""
    size = end - start
    if end > len(b) or size > _RUN_BYTES:
        return
    if len(runs) >= _TABLE_ENTRIES:
        runs.clear()
    runs[b[start:end]] = values
    latest = sizes[b[start]]
    if size in latest:
        latest.remove(size)
    latest.insert(0, size)
    del latest[_RUN_SIZES:]


class OtherOutlineError(ValueError):
    """Not a record of the outline that straight-line code is for."""


Found = tuple[Any, ...]  # how long the bytes are, then their values


class Sizes:
    """How long the bytes at a place were, by the first byte: the two that are tried, and others."""

    def __init__(self) -> None:
        self.one = [0] * 256
        self.two = [0] * 256
        self._all: list[list[int]] = [[] for _ in range(256)]

    def others(self, first: int) -> Sequence[int]:
        """Sizes that are not among the two."""
        return self._all[first][2:]

    def prefer(self, first: int, size: int) -> None:
        """Try `size` first from now on."""
        sizes = [size, *(other for other in self._all[first] if other != size)][:_RUN_SIZES]
        self._all[first] = sizes
        self.one[first], self.two[first] = sizes[0], sizes[min(1, len(sizes) - 1)]


class _Table(dict[bytes, Found]):
    """What bytes say that were read before; bounded, and safe between threads.

    Whoever asks looks up as many bytes as one of two sizes says. Found bytes stood whole in an
    earlier record, and reading depends on no byte behind them: so whatever is found is right, and
    a wrong size finds nothing.
    """

    def found_or_read(
        self, sizes: Sizes, b: bytes, i: int, read: Callable[[bytes, int], Found]
    ) -> Found:
        first = b[i]
        for size in sizes.others(first):
            found = self.get(b[i : i + size])
            if found:
                sizes.prefer(first, size)
                return found
        found = read(b, i)
        size = found[0]
        if i + size > len(b):
            raise OtherOutlineError("the record is cut")
        if size <= _RUN_BYTES:
            if len(self) >= _TABLE_ENTRIES:
                self.clear()
            self[b[i : i + size]] = found
            sizes.prefer(first, size)
        return found


class Run(_Table):
    """One place of a straight line: what its runs said.

    Args:
        leaves: in order the shape of a field, or the bytes that stand there.
    """

    SHAPES: ClassVar[frozenset[str]] = frozenset({"long", "string", "double", "boolean"})

    def __init__(self, leaves: Sequence[bytes | str]) -> None:
        super().__init__()
        self._leaves = leaves
        self.sizes = Sizes()

    def read(self, b: bytes, i: int) -> Found:
        """What stands at `i`, which neither size found.

        Raises:
            OtherOutlineError: other bytes where known ones belong.
        """
        return self.found_or_read(self.sizes, b, i, self._read)

    def _read(self, b: bytes, i: int) -> Found:
        values, j = [], i
        for leaf in self._leaves:
            if isinstance(leaf, bytes):
                if b[j : j + len(leaf)] != leaf:
                    raise OtherOutlineError(f"byte {j}: another count or branch")
                j += len(leaf)
            else:
                value, j = _READERS[leaf](b, j)
                values.append(value)
        return j - i, *values


class TensorHeaders(_Table):
    """What stands before the data of a tensor: its length, dtype, shape and codec."""

    def read(self, sizes: Sizes, b: bytes, i: int) -> Found:
        """What stands at `i`, which neither of `sizes` found."""
        return self.found_or_read(sizes, b, i, _read_head)


def _read_head(b: bytes, i: int) -> Found:
    dtype, j = _read_text(b, i)
    shape: list[int] = []
    count, j = read_count(b, j)
    while count:
        for _ in range(count):
            axis, j = read_long(b, j)
            shape.append(axis)
        count, j = read_count(b, j)
    codec, j = _read_text(b, j)
    num_bytes, j = read_length(b, j)
    return j - i, num_bytes, dtype, tuple(shape), codec


def _read_text(b: bytes, i: int) -> tuple[str, int]:
    n, i = read_length(b, i)
    return b[i : i + n].decode(), i + n


def _read_double(b: bytes, i: int) -> tuple[float, int]:
    return _DOUBLE(b, i)[0], i + 8


def _read_boolean(b: bytes, i: int) -> tuple[bool, int]:
    if b[i] > 1:
        raise OtherOutlineError(f"byte {i}: no boolean")
    return b[i] == 1, i + 1


_DOUBLE = struct.Struct("<d").unpack_from
_READERS: dict[str, Callable[[bytes, int], tuple[Any, int]]] = {
    "long": read_long,
    "string": _read_text,
    "double": _read_double,
    "boolean": _read_boolean,
}
