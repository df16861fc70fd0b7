"""Reads a safetensors file without the library: 8 bytes of length, a JSON header, then the data.

Format: https://huggingface.co/docs/safetensors, section Format. Content is checked against the hash
that was published (`weight_hash.py`) before a tensor is handed out.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from pathlib import Path

import torch

from .errors import PullError
from .pieces import SIZES
from .target import Row
from .weight_hash import hash_of

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_LENGTH = struct.Struct("<Q")
# What reading can raise where the bytes are not what they should be; RuntimeError is torch's.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, struct.error, RuntimeError)


def read(path: Path, weight_hash: str) -> dict[str, torch.Tensor]:
    """All tensors, in name order, mapped from the file; private copies on write.

    Raises:
        PullError: `gone`: no such file; `checksum`: another content than was published.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        (length,) = _LENGTH.unpack_from(data)
        if length > len(data) - _LENGTH.size:
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        tensors = _tensors(header, data[_LENGTH.size + length :])
    except FileNotFoundError as err:
        raise PullError("gone", f"{path} is not there: no longer served") from err
    except (OSError, *_MALFORMED) as err:
        raise PullError("checksum", f"{path} is no whole safetensors file: {err}") from err
    found = hash_of(tensors.items())
    if found != weight_hash:
        raise PullError("checksum", f"{path} has content {found}, {weight_hash} was published")
    return tensors


def rows(tensors: dict[str, torch.Tensor]) -> list[Row]:
    """Its layout."""
    return [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def _tensors(header: dict[str, dict[str, object]], data: memoryview) -> dict[str, torch.Tensor]:
    if not isinstance(header, dict):
        raise TypeError("its header is no object")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items()):
        dtype, shape = _DTYPES[str(entry["dtype"])], [int(n) for n in entry["shape"]]  # type: ignore[attr-defined]
        start, end = (int(n) for n in entry["data_offsets"])  # type: ignore[attr-defined]
        if end - start != math.prod(shape) * SIZES[dtype] or end > len(data):
            raise ValueError(f"{name} does not fill [{start}, {end})")
        if start == end:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            continue
        flat = torch.frombuffer(data[start:end], dtype=torch.uint8)
        tensors[name] = flat.view(getattr(torch, dtype)).view(shape)
    return tensors
