"""Files by content: signatures that are cheap, hashes that are not and so are remembered."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.log.errors import ConfigError

LINE_BYTES = 4 << 20  # of one row; a million tokens
REMEMBERED_BYTES = 32 << 20  # hashing a smaller file takes less than a tenth of a second


class Signature(NamedTuple):
    """What changes when a file is written or replaced."""

    size: int  # bytes
    mtime_ns: int
    inode: int


def signature(path: Path) -> Signature:
    """Of a file.

    Raises:
        OSError: it cannot be looked at.
    """
    found = path.stat()
    return Signature(found.st_size, found.st_mtime_ns, found.st_ino)


def content_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; of a large one remembered while its signature stays.

    Raises:
        OSError: it cannot be read.
    """
    before = signature(path)
    if before.size < REMEMBERED_BYTES:
        return _hashed(path)
    key = hashlib.sha256(f"{path.resolve()}\n{tuple(before)}".encode()).hexdigest()
    memo = cache_folder() / "hashes" / key
    with suppress(OSError, UnicodeDecodeError):
        remembered = memo.read_text(encoding="ascii")
        if len(remembered) == 64:  # else a power cut emptied it
            return remembered
    digest = _hashed(path)
    if signature(path) == before:
        with suppress(OSError):  # a cache that cannot be written costs time, no more
            write_whole(memo, digest.encode("ascii"))
    return digest


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


def _hashed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
