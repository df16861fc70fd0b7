"""Which device a role computes on: one GPU a process, and it sees no other.

Every thread of torch begins on GPU 0, and NCCL takes the current one: a process that sees only its
own GPU cannot use another by mistake, whatever thread it is in.
"""

from __future__ import annotations

import os

import torch

from streams.errors import ConfigError
from workers.engines.base import CPU

CUDA = "cuda"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def claim_device(field: str, wanted: str) -> str:
    """Hide all GPUs but `wanted` from this process; returns torch's name for what is left.

    Call it before anything touches CUDA: torch reads the variable once.

    Args:
        field: that asked for it, for the error.
        wanted: `cpu` (nothing is hidden), `cuda`, or `cuda:N`, which counts among those that
            `CUDA_VISIBLE_DEVICES` leaves.

    Raises:
        ConfigError: there is no such GPU, or torch is built without CUDA.
    """
    if wanted == CPU:
        return CPU
    _, _, number = wanted.partition(":")
    if number:
        os.environ[VISIBLE] = _visible(field, int(number))
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{field} is {wanted!r}, but torch {torch.__version__} finds no GPU "
            f"({VISIBLE}={os.environ.get(VISIBLE, '')!r})"
        )
    return CUDA


def nearest_device(field: str, wanted: str) -> str:
    """As `claim_device`, but the CPU where there is no such GPU: to look at a run elsewhere."""
    try:
        return claim_device(field, wanted)
    except ConfigError:
        return CPU


def _visible(field: str, number: int) -> str:
    """The GPU `number` as it is called outside of this process."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return str(number)
    names = [name.strip() for name in named.split(",") if name.strip()]
    if number >= len(names):
        raise ConfigError(
            f"{field} is 'cuda:{number}', but {VISIBLE}={named!r} leaves {len(names)} GPUs"
        )
    return names[number]
