"""Files that get their name once they are whole and on disk."""

from __future__ import annotations

import os
from pathlib import Path


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
