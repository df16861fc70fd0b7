"""The cache folder, for files that were downloaded or computed once."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return `RLSTREAMS_CACHE`, else `rlstreams` in the platform's cache folder."""
    if named := os.environ.get("RLSTREAMS_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rlstreams"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlstreams"
