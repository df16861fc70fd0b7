"""How what is hashed is cut, and how many hash it. Knows no torch."""

from __future__ import annotations

import os

PIECE_BYTES = 4 << 20
_MAX_THREADS = 16  # what copies from one GPU, or reads of one disk, keep busy


def num_threads() -> int:
    """Cores that this process may use, within reason."""
    of_process = getattr(os, "sched_getaffinity", None)
    cores = len(of_process(0)) if of_process else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)
