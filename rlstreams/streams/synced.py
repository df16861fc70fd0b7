"""Files that appear under their name whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file, and its folders, so that nobody reads half of it.

    Args:
        is_private: the file is for its owner alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)  # in containers each start has the same process id
    mode = 0o600 if is_private else 0o666
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        beside.replace(path)
    except OSError:  # the disk is full, say
        beside.unlink(missing_ok=True)
        raise


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
