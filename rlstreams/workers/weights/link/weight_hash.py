"""The hash of a version: of names, dtypes, shapes and bits, computed where the weights lie.

Each tensor is read as signed words of its element's size, an element of 8 bytes as two words of 4.
Word `w` at place `i` counts as x = mix(w + (i + 1) * SPREAD), and a tensor as the sum of its x and
the sum of their squares, all modulo 2^64. Sums of integers do not depend on order: a GPU and a CPU
get the same, and shards add up to the whole. The hash is SHA-256 over, for each tensor in name
order, a line `["name","dtype",[shape],"digits"]`, the digits being both sums in hexadecimal. It
finds accidents, as few words as one bit, and is no protection against an adversary (decision 0044).
mix: Degski's 64-bit finalizer, x ^= x >>> 32; x *= M; x ^= x >>> 32; x *= M; x ^= x >>> 32, a
bijection, https://gist.github.com/degski/6e2069d6035ae04d5d6f64981c995ec2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
MULTIPLIER = 0xD6E8FEB86659FD93
_LOW = 0xFFFFFFFF
_WORDS = {1: torch.int8, 2: torch.int16}
_CPU_CHUNK = 1 << 15  # words, by thread: their sums stay in its cache
_GPU_CHUNK = 1 << 23  # words: 0.2 GB of temporary memory, where nothing is compiled
_COMPILED_FROM = 1 << 20  # words: a small model is not worth ten seconds of compiling
_COMPILED_CHUNK = 1 << 26  # words: next to no temporary memory
_ROW = 4096  # words that one block of a compiled sum takes


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The hash of these tensors, on any devices."""
    return hash_of_sums(tensors, {name: sums_of(tensor) for name, tensor in tensors.items()})


def hash_of_sums(facts: Mapping[str, torch.Tensor], sums: Mapping[str, torch.Tensor]) -> str:
    """The hash of a version, 64 hexadecimal digits; waits for the device once.

    Args:
        facts: tensors of the dtypes and whole shapes.
        sums: int64 [2] of each tensor.
    """
    digest = hashlib.sha256()
    names = sorted(facts)
    for name, numbers in zip(names, on_host([sums[name] for name in names]), strict=True):
        dtype = str(facts[name].dtype).removeprefix("torch.")
        digits = "".join(f"{number % 2**64:016x}" for number in numbers)
        row = [name, dtype, list(facts[name].shape), digits]
        digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


@torch.no_grad()
def sums_of(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Both sums of a tensor or of a part of one: int64 [2], on its device; parts add up.

    Args:
        start: elements of the whole before this part.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    if flat.numel():
        start *= words.numel() // flat.numel()
    spread, parts = _spread(words.device), []
    is_large = words.is_cuda and words.numel() >= _COMPILED_FROM
    compiled = _compiled(words.device) if is_large else _sums
    rows = 0 if compiled is _sums else words.numel() // _ROW * _ROW
    for first in range(0, rows, _COMPILED_CHUNK):
        table = words[first : min(first + _COMPILED_CHUNK, rows)].view(-1, _ROW)
        parts.append(compiled(table, start + first + 1, spread))
    chunk = _GPU_CHUNK if words.is_cuda else _CPU_CHUNK * torch.get_num_threads()
    for first in range(rows, words.numel(), chunk):
        parts.append(_sums(words[first : first + chunk], start + first + 1, spread))
    if len(parts) == 1:
        return parts[0]
    return sum(parts, torch.zeros(2, dtype=torch.int64, device=words.device))


@torch.no_grad()
def sums_at(elements: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Addends of single elements to both sums of their tensor: int64 [2], on their device.

    If other elements come to these places, the tensor's sums lose what the old ones add, and gain
    what the new ones add.

    Args:
        elements: [N].
        places: int64 [N], of each in the whole tensor, from 0.
    """
    words = elements.contiguous().view(_WORDS.get(elements.element_size(), torch.int32))
    each = words.numel() // max(1, elements.numel())  # words of an element
    places = (places[:, None] * each + torch.arange(1, each + 1, device=places.device)).view(-1)
    return _summed(places.mul_(_spread(words.device)).add_(words))


def on_host(sums: Sequence[torch.Tensor]) -> list[list[int]]:
    """Sums of several tensors as numbers, read together."""
    if not sums:
        return []
    found: list[list[int]] = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return found


def _sums(words: torch.Tensor, place: int, spread: torch.Tensor) -> torch.Tensor:
    """
    Args:
        words: in one row, or in several of one length.
        place: of the first word, from 1.
        spread: `SPREAD`; a constant would become part of an index, which has 32 bits (inductor).
    """
    x = torch.arange(place, place + words.numel(), device=words.device).view(words.shape)
    return _summed(x.mul_(spread).add_(words))


def _summed(x: torch.Tensor) -> torch.Tensor:
    """Both sums, of `w + (i + 1) * SPREAD`; overwrites it."""
    for _ in range(2):
        x ^= (x >> 32) & _LOW  # torch shifts the sign in
        x *= _signed(MULTIPLIER)
    x ^= (x >> 32) & _LOW
    return torch.stack([x.sum(-1).sum(), (x * x).sum(-1).sum()])


def _signed(number: int) -> int:
    """The int64 of these 64 bits."""
    return number - 2**64 if number >= 2**63 else number


@lru_cache
def _spread(device: torch.device) -> torch.Tensor:
    return torch.tensor(_signed(SPREAD), device=device)


@lru_cache
def _compiled(device: torch.device) -> Callable[..., torch.Tensor]:
    """`_sums` in one pass over memory instead of twenty; uncompiled, if this machine cannot."""
    words = torch.arange(-_ROW, _ROW, dtype=torch.int16, device=device).view(-1, _ROW // 2)
    try:
        compiled: Callable[..., torch.Tensor] = torch.compile(_sums, dynamic=True)
        given = words, 7, _spread(device)
        if bool((compiled(*given) == _sums(*given)).all()):
            return compiled
    except Exception:  # noqa: BLE001  (no compiler here, or one that fails: the sums are the same)
        pass
    return _sums
