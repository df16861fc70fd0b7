"""SHA-256 of files and of plain values, in hexadecimal digits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def content_hash(path: Path) -> str:
    """Return the hash of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: object) -> str:
    """Return the hash of a value's JSON; the order of keys does not count."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
