"""What is taken for memory that ran out."""

from __future__ import annotations

import torch

from rlstreams.workers.trainer.learn.out_of_memory import is_out_of_memory


def test_what_says_that_memory_ran_out() -> None:
    """Either allocator's word; another error of the same type is none."""
    told = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError(told))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError(told))
