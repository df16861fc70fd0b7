"""Code that reads the fields of a record that have no control flow around them.

Integers of up to three bytes are read in line, repeated texts are interned straight from their
bytes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlstreams.schemas.source import LENGTH, SHORT_TEXT, UNSIGNED, Source, refuse, signed
from rlstreams.schemas.tensor import Buffer
from rlstreams.schemas.varint import read_count, read_long, read_unsigned

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower


class _Texts(dict[bytes, str]):
    """Decoded short texts by their bytes, the length byte included."""

    def __missing__(self, encoded: bytes) -> str:
        if encoded[0] != 2 * len(encoded) - 2:
            raise IndexError(f"a text of {encoded[0] >> 1} bytes in {len(encoded) - 1}")
        text = encoded[1:].decode()
        if len(self) >= _TABLE_ENTRIES:
            self.clear()
        self[encoded] = text
        return text


def read_longs(buf: Buffer, i: int, count: int) -> tuple[tuple[int, ...], int]:
    """An array of longs, of which a first block of `count` begins at `i`, and where it ends."""
    longs: list[int] = []
    while count:
        for _ in range(count):
            n, i = read_long(buf, i)
            longs.append(n)
        count, i = read_count(buf, i)
    return tuple(longs), i


SCOPE: dict[str, object] = {
    "SHORT": SHORT_TEXT,
    "TEXT": _Texts(),
    "read_long": read_long,
    "read_unsigned": read_unsigned,
    "read_longs": read_longs,
    "refuse": refuse,
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One field without control flow around it: its value goes to `target`."""

    target: str
    shape: str
    inner: Any = None


def leaf_lines(leaves: Sequence[Leaf], source: Source) -> list[str]:
    """Code that reads neighbouring leaves; doubles that are neighbours go through one call."""
    lines: list[str] = []
    for is_double, group in itertools.groupby(leaves, lambda leaf: leaf.shape == "double"):
        if is_double:
            targets = [leaf.target for leaf in group]
            unpack = f"DOUBLES_{len(targets)}"
            source.scope[unpack] = struct.Struct(f"<{len(targets)}d").unpack_from
            lines += [f"{', '.join(targets)}, = {unpack}(b, i)", f"i += {8 * len(targets)}"]
        else:
            lines += [line for leaf in group for line in _scalar(leaf)]
    return lines


def _scalar(leaf: Leaf) -> list[str]:
    target = leaf.target
    match leaf.shape:
        case "long":
            return signed(target)
        case "count":
            sized = ["if n & 1:  # negative: a size in bytes follows", f"    {target} += 1"]
            return [*UNSIGNED, f"{target} = n >> 1", *sized, "    _, i = read_long(b, i)"]
        case "branch":
            return [f"{target} = b[i]", "i += 1"]
        case "boolean":
            other = "(b[i] != 0 and refuse('boolean', b[i], i))"
            return [f"{target} = b[i] == 1 or {other}", "i += 1"]
        case "bytes":
            data = "bytes(view[i:j])" if leaf.inner is bytes else "view[i:j]"
            return [*LENGTH, f"{target} = {data}", "i = j"]
        case _:
            short = ["n = SHORT[b[i]]", "if n:", "    j = i + n"]
            long = [f"    {line}" for line in (*LENGTH, f"{target} = b[i:j].decode()")]
            return [*short, f"    {target} = TEXT[b[i:j]]", "else:", *long, "i = j"]
