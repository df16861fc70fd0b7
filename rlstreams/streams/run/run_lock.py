"""One `up` or one replay per run folder: a second would share the broker, and stop it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.log.owner_lock import OwnedError, check_free, take

LOCK_FILE = "up.lock"


class FolderGoneError(StreamsError):
    """A run's folder was deleted or moved away while it went on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"run.dir: {folder} was deleted or moved away while the run went on; what lay in it, "
            "the log of an embedded broker included, is gone, so the run cannot go on"
        )


@contextmanager
def locked_run(folder: Path) -> Iterator[Callable[[], bool]]:
    """Hold the folder's lock for the block; it ends with the process in any case.

    Yields a function that returns whether the folder is still the locked one.

    Raises:
        ConfigError: another process holds it, or the folder cannot be written; names both.
    """
    try:
        fd = take(folder / LOCK_FILE)
    except OwnedError as err:
        raise _in_use(folder, err) from None
    except OSError as err:
        raise ConfigError(
            f"run.dir: {folder} cannot be written ({err.strerror}): name a folder that you may "
            "write, on a disk that has room"
        ) from err
    locked = os.fstat(fd)

    def is_there() -> bool:
        try:
            return os.path.samestat(locked, os.stat(folder / LOCK_FILE))
        except FileNotFoundError:
            return False

    try:
        yield is_there
    finally:
        os.close(fd)


def refuse_in_use(folder: Path) -> None:
    """Refuse a folder whose lock is held, before there is a reason to take it. Changes nothing.

    Raises:
        ConfigError: another process holds it; names both.
    """
    try:
        check_free(folder / LOCK_FILE)
    except OwnedError as err:
        raise _in_use(folder, err) from None
    except OSError:  # `locked_run` names it
        return


def _in_use(folder: Path, err: OwnedError) -> ConfigError:
    return ConfigError(
        f"run.dir: {folder} is in use by another `rlstreams up` or `replay` (process "
        f"{err.owner}): wait "
        "for it, stop it with Ctrl-C, or take another run (up --run.id NAME, replay --as NAME)"
    )
