"""SHA-256 of a file's content, of a value's JSON and of texts, hexadecimal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content; raises OSError, if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value: object) -> str:
    """Return the SHA-256 of a value's JSON in one spelling: names in order, no white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def text_id(*said: str) -> str:
    """Return an id that follows from texts: who says the same again gives the same id."""
    from rlstreams.schemas.text import whole_text  # imports numpy, which `--help` does without

    return hashlib.sha256(whole_text("\n".join(said)).encode()).hexdigest()[:32]
