"""An exclusive lock in a file that says who holds it; it goes with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class OwnedError(Exception):
    """Another process holds the lock.

    Args:
        owner: its process id as it wrote it, or "unknown".
    """

    def __init__(self, owner: str) -> None:
        super().__init__(f"held by process {owner}")
        self.owner = owner


def take(path: Path) -> int:
    """The lock, as a descriptor: closing it gives the lock back. The file is made, and stays.

    Raises:
        OwnedError: another process holds it; names it.
        OSError: the file cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OwnedError(
                os.read(fd, 20).decode("ascii", "replace").strip() or "unknown"
            ) from None
        os.truncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode("ascii"))
    except BaseException:
        os.close(fd)
        raise
    return fd
