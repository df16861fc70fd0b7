"""Recognition of memory that ran out in a micro-batch.

A step is begun again with smaller micro-batches (`cut.py`), never continued: part of the failed one
may be in the gradient already. The cut in force is the step's own (`StepCompleted`), so a redo cuts
there at once and adds up in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
# Messages of the CPU's allocator; the accelerator's has an exception type of its own.
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")


class OutOfMemoryError(Exception):
    """Memory ran out in micro-batch `index` of a step, which did not happen."""

    def __init__(self, index: int, detail: str) -> None:
        super().__init__(f"micro-batch {index}: {detail}")
        self.index = index
        self.detail = detail


class SampleTooLargeError(Exception):
    """One sample alone does not fit; `index` is its place in the batch."""

    def __init__(self, index: int, detail: str) -> None:
        super().__init__(f"sample {index} of the batch does not fit alone: {detail}")
        self.index = index
        self.detail = detail


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def in_memory(clear: Callable[[], None], index: int, work: Callable[[], T]) -> T:
    """Result of `work` on micro-batch `index`.

    Raises:
        OutOfMemoryError: memory ran out; `clear` was called, and a GPU's cache is empty.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as err:
        if not is_out_of_memory(err):
            raise
        detail = str(err) or type(err).__name__  # a MemoryError has no message
    # Outside of the handler, because the caught error's frames hold the tensors.
    clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemoryError(index, detail)
