"""The device that a role computes on: one GPU a process, and it sees no other.

Every thread of torch begins on GPU 0, and NCCL takes the current one: a process that sees only its
own GPU cannot use another by mistake, whatever thread it is in.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.base import CPU, VISIBLE

CUDA = "cuda"
T = TypeVar("T")


def usable(wanted: str) -> str:
    """The wanted device, or the CPU of a host without a GPU."""
    return wanted if torch.cuda.is_available() else CPU


def claim_device(field: str, wanted: str) -> str:
    """Hide all GPUs but `wanted` from this process, before anything touches CUDA: torch reads the
    variable once. Returns torch's name for what is left.

    Args:
        field: the setting that asks for it, for the error.
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


def on_device(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    """The array on a device, without waiting for the device's work."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == CPU else tensor.pin_memory().to(device, non_blocking=True)


def claim_devices(field: str, wanted: str, ranks: int) -> tuple[str, tuple[str, ...]]:
    """As `claim_device`, for the first of several ranks; and the GPU of each other one, as
    `CUDA_VISIBLE_DEVICES` names it ("" on the CPU). Rank R has the GPU R behind the first.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    if ranks == 1 or wanted == CPU:
        return claim_device(field, wanted), ("",) * (ranks - 1)
    first = int(wanted.partition(":")[2] or 0)
    named = tuple(_visible(field, first + rank) for rank in range(ranks))
    if os.environ.get(VISIBLE) is None and (count := torch.cuda.device_count()) < first + ranks:
        raise ConfigError(
            f"{field} is {wanted!r} for {ranks} ranks, but torch finds {count} GPUs: "
            f"lower {field.partition('.')[0]}.ranks"
        )
    return claim_device(field, f"{CUDA}:{first}"), named[1:]


def nearest_devices(field: str, wanted: str, ranks: int) -> tuple[str, tuple[str, ...]]:
    """As `claim_devices`, but the CPU if there are fewer GPUs: to look at a run elsewhere."""
    try:
        return claim_devices(field, wanted, ranks)
    except ConfigError:
        return CPU, ("",) * (ranks - 1)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as they are outside of it."""
    if (named := os.environ.get(VISIBLE)) is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [name.strip() for name in named.split(",") if name.strip()]


def _visible(field: str, number: int) -> str:
    """Name of the GPU `number` outside of this process."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return str(number)
    names = visible_gpus()
    if number >= len(names):
        raise ConfigError(
            f"{field} is 'cuda:{number}', but {VISIBLE}={named!r} leaves {len(names)} GPUs"
        )
    return names[number]


class BinRunner(Protocol):
    """Decides when a bin is computed."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Run `work`, now or when it may; its result."""


def at_once(work: Callable[[], T], /) -> T:
    """Run `work` at once: a `BinRunner` of a process that has its GPU to itself."""
    return work()
