"""The folder that keeps what was downloaded or computed once."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where downloads are kept: `RLSTREAMS_CACHE`, else the platform's cache folder."""
    if named := os.environ.get("RLSTREAMS_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rlstreams"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlstreams"
