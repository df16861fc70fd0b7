"""Files that appear under their name whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path, *, is_private: bool = False) -> Iterator[Path]:
    """Yield a new, empty file to write to, which has the name `path` after the block; folders are
    made. After an error there is no such file.

    Args:
        is_private: the file is for its owner alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Random: in containers each start has the same process id, and they may share a folder.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    mode = 0o600 if is_private else 0o666
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file, and its folders, so that nobody reads half of it; the file as in `beside`."""
    with beside(path, is_private=is_private) as unfinished:
        unfinished.write_bytes(content)


def replace_synced(temporary: Path, path: Path) -> None:
    """Give a whole file its name: its bytes and its name are on disk afterwards."""
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
