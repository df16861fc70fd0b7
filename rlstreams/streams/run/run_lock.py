"""One `up` or one replay per run folder: a second would share the broker, and stop it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.owner_lock import OwnedError, take

LOCK_FILE = "up.lock"


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Hold the folder as long as the block runs; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another process holds it; names both.
    """
    try:
        fd = take(folder / LOCK_FILE)
    except OwnedError as err:
        raise ConfigError(
            f"run.dir: {folder} is in use by another `rlstreams up` or `replay` (process "
            f"{err.owner}): wait "
            "for it, stop it with Ctrl-C, or take another run (up --run.id NAME, replay --as NAME)"
        ) from None
    try:
        yield
    finally:
        os.close(fd)
