"""The lock of a broker's folder: held as long as the process lives that it was handed to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

TAKE_S = 2.0  # somebody's `is_held` has a shared lock for a moment


class FolderInUseError(Exception):
    """Another process holds the lock."""


class FolderLock:
    """An exclusive `flock` on `broker.lock`."""

    def __init__(self, folder: Path) -> None:
        """Nothing is opened before the first use."""
        self._path = folder / "broker.lock"

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Hold it for the block, and beyond in every child that the file was passed to.

        Raises:
            FolderInUseError: another process holds it.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(fd)
            yield fd
        finally:
            # The lock belongs to the open file: a child that inherited it still holds it.
            os.close(fd)

    def is_held(self) -> bool:
        """Whether some process holds it."""
        try:
            fd = os.open(self._path, os.O_RDONLY)  # it may be another user's
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


def _take(fd: int) -> None:
    deadline = time.monotonic() + TAKE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FolderInUseError from None
            time.sleep(0.02)
        else:
            return
