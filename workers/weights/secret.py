"""The run's secret: as configured, or made once in the run's folder for roles that share it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from rlstreams.workers.weights.channel import WeightError

FILE = "weights.secret"


def run_secret(configured: str, folder: Path) -> str:
    """The configured secret, else that of `folder`, which is made readable by its owner only.

    Raises:
        WeightError: the file is empty.
    """
    if configured:
        return configured
    path = folder / FILE
    if not path.exists():
        _make(path)
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise WeightError(f"{path} is empty; remove it, or name a secret in weights.secret")
    return secret


def _make(path: Path) -> None:
    """Whole or not at all, and one only, whoever else makes it now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(temporary)
    temporary.unlink()
