"""Text of a model or of a data set on a terminal: what would steer the terminal is spelled out."""

from __future__ import annotations

import re

# C0 without tab and newline, delete, and C1: ESC [ 2 J would clear the screen.
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """`text` with control characters as Python escapes them."""
    return _STEERS.sub(lambda found: repr(found[0])[1:-1], text)
