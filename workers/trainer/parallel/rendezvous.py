"""The folder in which the ranks of one trainer meet: this user's alone, and gone with the trainer.

A trainer that is killed cannot remove its own. A file in it is locked as long as its trainer lives,
whatever its process id or container, so the next trainer removes the folders whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "rlstreams-ranks-"
_LOCK = "alive"


class RendezvousFolder:
    """A folder of files that ranks meet by."""

    def __init__(self, place: Path | None = None) -> None:
        """
        Args:
            place: where folders are made; None: the system's for temporary files.
        """
        place = Path(tempfile.gettempdir()) if place is None else place
        remove_stale(place)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        new = self.folder / f"{_LOCK}.new"
        self._lock: int | None = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.folder / _LOCK)  # under this name it was never free
        self._num_files = 0

    def new_file(self) -> Path:
        """A name that nobody has used."""
        self._num_files += 1
        return self.folder / f"group-{self._num_files}"

    def close(self) -> None:
        """Remove it; idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_stale(place: Path) -> None:
    """Remove this user's folders in `place` whose trainer is gone; one without a lock is left."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another trainer removes it too, or it is not ours
            if folder.stat().st_uid == os.getuid() and _is_stale(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    fd = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
