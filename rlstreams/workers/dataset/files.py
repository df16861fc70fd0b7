"""Files: writing one whole, and lines that are not too long."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlstreams.streams.log.errors import ConfigError

LINE_BYTES = 4 << 20  # of one row; a million tokens


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)


def numbered_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their numbers, from 1.

    Args:
        name: field and file, for the error.

    Raises:
        ConfigError: a line longer than `LINE_BYTES`.
    """
    for number in itertools.count(1):
        line = file.readline(LINE_BYTES + 1)
        if not line:
            return
        yield number, checked_length(line, f"{name}: line {number}")


def checked_length(line: bytes, place: str) -> bytes:
    """A row that is not too long: to tokenise one takes hundreds of times as much memory.

    Raises:
        ConfigError: it is longer than `LINE_BYTES`.
    """
    if len(line) > LINE_BYTES:
        raise ConfigError(f"{place} is longer than {LINE_BYTES >> 20} MiB; shorten or remove it")
    return line
