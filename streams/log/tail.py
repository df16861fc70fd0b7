"""The last lines of a log file of any length: after days, it may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 1 << 16


def tail(path: Path, num_lines: int) -> Sequence[str]:
    """The last lines of a file, of its last `TAIL_BYTES` at the most; none if there is no file."""
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return text.splitlines()[-num_lines:]
