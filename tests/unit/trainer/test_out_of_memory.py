"""Where a batch is cut when memory runs out, and what is taken for that."""

from __future__ import annotations

import pytest
import torch

from rlstreams.workers.trainer.learn.out_of_memory import is_out_of_memory, smaller_borders


@pytest.mark.parametrize(
    ("borders", "widths", "failed", "expected"),
    [
        ((8,), (10,), 0, (4, 4)),
        ((3, 5), (10, 10), 1, (3, 3, 2)),  # the smaller one did fit
        ((5, 3), (10, 10), 1, (3, 2, 2, 1)),  # what is larger would not
        ((2, 1), (10, 40), 0, (1, 1, 1)),  # larger, and one sample: stays
        ((4, 1), (10, 10), 1, (4, 1)),  # nothing is left to cut
    ],
)
def test_what_is_as_large_is_halved_too(
    borders: tuple[int, ...], widths: tuple[int, ...], failed: int, expected: tuple[int, ...]
) -> None:
    """So that a step is begun anew a few times, not once a micro-batch."""
    assert expected == smaller_borders(borders, widths, failed)
    assert sum(expected) == sum(borders)


def test_what_says_that_memory_ran_out() -> None:
    """Either allocator's word; another error of the same type is none."""
    told = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError(told))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError(told))
