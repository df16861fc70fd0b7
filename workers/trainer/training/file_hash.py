"""A file's hash by as many cores as there are: SHA-256 over the SHA-256 of each 4 MiB of it.

A checkpoint of billions of weights is tens of gigabytes, and training waits while it is written.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

PIECE_BYTES = 4 << 20
_MAX_THREADS = 16  # what reads of one disk keep busy


def file_hash(path: Path) -> str:
    """64 hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    whole = hashlib.sha256()
    with path.open("rb") as file:
        starts = range(0, os.fstat(file.fileno()).st_size, PIECE_BYTES)
        piece = partial(_sha256_at, file.fileno())
        if len(starts) <= 1:
            whole.update(b"".join(map(piece, starts)))
        else:
            with ThreadPoolExecutor(_num_threads(), thread_name_prefix="file-hash") as pool:
                for digest in pool.map(piece, starts):
                    whole.update(digest)
    return whole.hexdigest()


def _num_threads() -> int:
    """Cores that this process may use, within reason."""
    of_process = getattr(os, "sched_getaffinity", None)
    cores = len(of_process(0)) if of_process else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


def _sha256_at(descriptor: int, start: int) -> bytes:
    digest = hashlib.sha256()
    left = PIECE_BYTES
    while left and (data := os.pread(descriptor, left, start + PIECE_BYTES - left)):
        digest.update(data)
        left -= len(data)
    return digest.digest()
