"""A digest of a model folder's weights from samples of them: without torch, and without loading.

It tells two models apart, and a model before training from one after it. It proves no equality:
that is the weight hash's work, which reads every byte. Files, their number, the type that they are
written in and whether they hold experts one by one or fused do not count: numbers are compared as a
run computes with them (decision 0105).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MOST_SAMPLED = 512  # tensors, spread over all names: each costs a seek
SAMPLE_NUMBERS = 1024  # of a tensor, from its middle: a first row may be padding
_TIED = "lm_head.weight"  # libraries write it, or leave it out, where it is the embedding
# By the format's name of a type that float32 holds without a rounding: how numpy reads it.
_WIDENED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Tensor(NamedTuple):
    file: Path
    begin: int  # in the file, bytes
    end: int
    dtype: str  # as the format names it: F32, BF16, ...
    shape: list[int]

    @property
    def kind(self) -> str:
        """The shape, and the type of one that is not widened."""
        return str(self.shape) if self.dtype in _WIDENED else f"{self.dtype} {self.shape}"


def folder_digest(folder: Path, dtype: str) -> str:
    """SHA-256 of names, shapes and samples, hexadecimal; empty: there are no safetensors that can
    be read.

    Args:
        dtype: what the run computes with: float32 or bfloat16.
    """
    try:
        stored = dict(_tensors(folder))
        tensors = dict(part for name in stored for part in _experts(name, stored))
        digest = hashlib.sha256()
        names = sorted(tensors.keys() - {_TIED})
        digest.update(json.dumps([[name, tensors[name].kind] for name in names]).encode())
        for name in names[:: len(names) // MOST_SAMPLED + 1]:
            digest.update(_sample(tensors[name], dtype))
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
                yield name, _Tensor(path, begin, end, about["dtype"], about["shape"])


def _experts(name: str, stored: Mapping[str, _Tensor]) -> Iterator[tuple[str, _Tensor]]:
    """Yield a fused tensor's experts under the names that they have one by one; any other as it is.

    Fused are `experts.gate_up_proj` (experts, 2 x width, hidden), gate above up, and
    `experts.down_proj`. Those with a bias are fused in all folders, and otherwise laid out.
    """
    tensor, (stem, _, leaf) = stored[name], name.rpartition(".")
    letters = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(leaf, ())
    is_fused = stem.endswith(".experts") and len(tensor.shape) == 3 and f"{name}_bias" not in stored
    if not letters or not is_fused or tensor.shape[1] % len(letters):
        yield name, tensor
        return
    num_experts, height, width = tensor.shape
    size = (tensor.end - tensor.begin) // (num_experts * len(letters))
    shape = [height // len(letters), width]
    for number in range(num_experts * len(letters)):
        expert, letter = divmod(number, len(letters))
        begin = tensor.begin + number * size
        part = tensor._replace(begin=begin, end=begin + size, shape=shape)
        yield f"{stem}.{expert}.{letters[letter]}_proj.weight", part


def _sample(tensor: _Tensor, dtype: str) -> bytes:
    stored_as = np.dtype(_WIDENED.get(tensor.dtype, "u1"))
    count = (tensor.end - tensor.begin) // stored_as.itemsize
    taken = min(SAMPLE_NUMBERS, count)
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin + (count - taken) // 2 * stored_as.itemsize)
        stored = np.frombuffer(file.read(taken * stored_as.itemsize), stored_as)
    if tensor.dtype not in _WIDENED:
        return stored.tobytes()
    is_upper = tensor.dtype == "BF16"  # the upper half of its float32
    bits = stored.astype("<u4") << 16 if is_upper else stored.astype("<f4").view("<u4")
    return (_rounded(bits) if dtype == "bfloat16" else bits).tobytes()


def _rounded(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """float32 numbers rounded to bfloat16, to nearest, ties to even; both as bits in uint32."""
    rounded: npt.NDArray[Any] = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return rounded
