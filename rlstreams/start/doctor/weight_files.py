"""Names, dtypes and shapes of a folder's tensors, from the headers of its safetensors files.

Such a file begins with the length of its header (8 bytes, little-endian) and the header, JSON: each
tensor's dtype, shape and place. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.streams.log.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    dtype: str  # as the format names it: F32, BF16, ...
    shape: tuple[int, ...]


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, of one file or of all that its index lists.

    Raises:
        ConfigError: a file is missing, damaged or of another format.
    """
    return {name: tensor for file in _files(folder) for name, tensor in tensors_in(file).items()}


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file.

    Raises:
        ConfigError: not such a file, or cut short.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"model.path: {file} ({size} bytes) is no safetensors file")
            header = json.loads(opened.read(length))
        tensors, num_bytes = _parsed(header)
    except OSError as err:
        raise ConfigError(f"model.path: cannot read {file}: {err.strerror}") from err
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as err:
        raise ConfigError(
            f"model.path: {file}: its header is none of a safetensors file: {err!r}"
        ) from err
    end = 8 + length + num_bytes
    if end != size:
        raise ConfigError(
            f"model.path: {file} has {size} bytes, its header promises {end}: "
            "the file is damaged; copy or download it again"
        )
    return tensors


def _parsed(header: dict[str, Any]) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a header, and the bytes behind it that they take."""
    header.pop("__metadata__", None)
    num_bytes = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    tensors = {
        name: StoredTensor(dtype=str(tensor["dtype"]), shape=tuple(map(int, tensor["shape"])))
        for name, tensor in header.items()
    }
    return tensors, num_bytes


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ConfigError(f"model.path: {folder} has no model.safetensors")
        return [single]
    try:
        names = set(map(str, json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"model.path: cannot read {index}: {err!r}") from err
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} of {len(names)} weight files: {missing[0]}"
        )
    return [folder / name for name in sorted(names)]
