"""Gradients that add up in one order on a GPU, so that a step made again has the same bits.

Torch takes such a backward of the fused attention kernels only in its strict mode, in which an
operation without one is refused, not merely warned of. Forwards cannot run in it: torch refuses
sums of integers, which are alike in any order. So the backward is strict, but not its
recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class NoOrderError(RuntimeError):
    """An operation of this model has no kernel that adds up gradients in one order; names it."""


_is_asked = False  # by this process, like torch's own switches


def ask(is_asked: bool) -> None:
    """Set whether gradients of this process are summed in one order."""
    global _is_asked  # noqa: PLW0603
    _is_asked = is_asked


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, in one order if `ask` was called with True.

    Raises:
        NoOrderError: an operation of this model has no such kernel; names it.
    """
    try:
        with _warn_only(False) if _is_asked else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as err:
        if not _is_asked or "deterministic" not in str(err):
            raise
        raise NoOrderError(str(err)) from err


def computed_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint`: contexts of a forward, and of its recomputation."""
    return nullcontext(), _warn_only(True) if _is_asked else nullcontext()


@contextmanager
def _warn_only(is_so: bool) -> Iterator[None]:
    before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=is_so)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=before)
