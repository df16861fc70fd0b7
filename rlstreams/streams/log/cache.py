"""The cache folder, for files that were downloaded or computed once."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError


def cache_folder() -> Path:
    """Return `RLSTREAMS_CACHE`, else `rlstreams` in the platform's cache folder.

    For a user who has no home (a number in a container), it is a folder among temporary files.

    Raises:
        ConfigError: others have made, or can write, the latter.
    """
    if named := os.environ.get("RLSTREAMS_CACHE"):
        return Path(named)
    is_mac = sys.platform == "darwin"
    if not is_mac and (place := os.environ.get("XDG_CACHE_HOME")):
        return Path(place) / "rlstreams"
    try:
        home = Path.home()
    except RuntimeError:
        return _without_home()
    return home / ("Library/Caches" if is_mac else ".cache") / "rlstreams"


def is_own(folder: Path) -> bool:
    """Whether nobody but this user can write the folder, which is made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _without_home() -> Path:
    folder = Path(tempfile.gettempdir()) / f"rlstreams-{os.getuid()}"
    if not is_own(folder) or folder.is_symlink():
        raise ConfigError(
            f"this user has no home folder, and {folder} cannot be made, or is not for this user "
            "alone: name a folder that you may write in RLSTREAMS_CACHE"
        )
    return folder
