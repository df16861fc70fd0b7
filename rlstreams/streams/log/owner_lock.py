"""An exclusive lock on a file that names its holder; the lock ends with the holder's process.

The lock belongs to the open file: a child that the descriptor was passed to holds it as well.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Take the lock; return its descriptor, whose closing releases it. The file is made, and stays.

    Raises:
        OwnedError: another process holds the lock; names the process.
        OSError: the file cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OwnedError(_owner(fd)) from None
        size_bytes = os.write(fd, f"{os.getpid()}\n".encode("ascii"))
        os.truncate(fd, size_bytes)  # after the write: on a full disk a file keeps its block
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def held(path: Path, *, wait_s: float, look_every_s: float = 0.02) -> Iterator[int]:
    """Hold the lock for the block; yield its descriptor, for children that hold it beyond.

    Raises:
        OwnedError: another process has held it for `wait_s`.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fd = take(path)
            break
        except OwnedError:
            if time.monotonic() > until_s:
                raise
        time.sleep(look_every_s)
    try:
        yield fd
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock. Takes a shared lock for a moment: `held` waits for that."""
    try:
        check_free(path)
    except OwnedError:
        return True
    return False


def check_free(path: Path) -> None:
    """Look as `is_held` does; makes no file.

    Raises:
        OwnedError: another process holds the lock; names the process.
    """
    try:
        fd = os.open(path, os.O_RDONLY)  # it may be another user's
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OwnedError(_owner(fd)) from None
    finally:
        os.close(fd)


def _owner(fd: int) -> str:
    return os.read(fd, 20).decode("ascii", "replace").strip() or "unknown"
