"""Reads a version from a safetensors file, and checks its content against the published hash."""

from __future__ import annotations

from pathlib import Path

import torch

from .errors import PullError
from .weight_hash import hash_of


def read(path: Path, weight_hash: str) -> dict[str, torch.Tensor]:
    """All tensors, in name order, mapped from the file; private copies on write.

    Raises:
        PullError: `gone`: no such file; `checksum`: its content is not the published one.
    """
    # Imported late: a process that reads no such file needs only torch.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except FileNotFoundError as err:
        raise PullError("gone", f"{path} is not there: no longer served") from err
    except (SafetensorError, OSError) as err:
        raise PullError("checksum", f"{path} is no whole safetensors file: {err}") from err
    found = hash_of(tensors)
    if found != weight_hash:
        raise PullError("checksum", f"{path} has content {found}, {weight_hash} was published")
    return tensors
