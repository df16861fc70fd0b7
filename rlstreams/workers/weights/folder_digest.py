"""A digest of a model folder's weights from samples of them: without torch, and without loading.

It tells two models apart, and a model before training from one after it. It proves no equality:
that is the weight hash's work, which reads every byte. Files and their number do not count.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MOST_SAMPLED = 512  # tensors, spread over all names: each costs a seek
SAMPLE_BYTES = 4096  # of a tensor, from its middle: a first row may be padding
_TIED = "lm_head.weight"  # libraries write it, or leave it out, where it is the embedding


class _Tensor(NamedTuple):
    file: Path
    begin: int  # in the file, bytes
    end: int
    kind: str  # dtype and shape


def folder_digest(folder: Path) -> str:
    """SHA-256 of names, types, shapes and samples, hexadecimal; empty: there are no safetensors
    that can be read."""
    try:
        tensors = dict(_tensors(folder))
        digest = hashlib.sha256()
        names = sorted(tensors.keys() - {_TIED})
        digest.update(json.dumps([[name, tensors[name].kind] for name in names]).encode())
        for name in names[:: len(names) // MOST_SAMPLED + 1]:
            digest.update(_sample(tensors[name]))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return ""  # the role that loads it reports that
    return digest.hexdigest() if names else ""


def _tensors(folder: Path) -> Iterator[tuple[str, _Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(size))
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in about["data_offsets"])
                yield name, _Tensor(path, begin, end, f"{about['dtype']} {about['shape']}")


def _sample(tensor: _Tensor) -> bytes:
    middle = (tensor.begin + tensor.end - SAMPLE_BYTES) // 2
    with tensor.file.open("rb") as file:
        file.seek(max(tensor.begin, middle))
        return file.read(min(SAMPLE_BYTES, tensor.end - tensor.begin))
