"""One `up` per run folder: a second one would share the first one's broker, and stop it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streams.errors import ConfigError

LOCK_FILE = "up.lock"


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Hold the folder as long as the block runs; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another process holds it; names both.
    """
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(fd, 20).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"run.dir: {folder} is in use by another `rlstreams up` (process {owner}): wait "
                "for it, stop it with Ctrl-C, or begin another run with `--run.id NAME`"
            ) from None
        os.truncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode("ascii"))
        yield
    finally:
        os.close(fd)
