"""Alternation of two processes on one GPU, a bin each.

Side by side the driver would cut the GPU's time into slices, which loses up to a third of it
(infra/decisions/0069-the-log-prob-worker-on-the-trainers-gpu.md).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from rlstreams.streams.log.owner_lock import OwnedError, held

SHIFT_S = 5.0  # longest wait for the other process's bin
APART_S = 60.0  # time of computing side by side, after one kept the GPU longer
_LOOK_EVERY_S = 0.0005
T = TypeVar("T")


class GpuShifts:
    """One of two processes of a GPU.

    Two locks make it fair: a process that waits for the GPU holds the next place, so the one that
    has just computed does not get the GPU again at once.
    """

    def __init__(
        self, gpu: str, note: Callable[[str], object], *, folder: Path | None = None
    ) -> None:
        """
        Args:
            gpu: its name outside of this process.
            note: receives the message that a process did not give the GPU back within `SHIFT_S`;
                then both compute at once for `APART_S`.
            folder: of the locks, the same for both; None: the system's temporary folder.
        """
        stem = f"rlstreams-{os.getuid()}-shift-{gpu.replace('/', '-')}"
        at = Path(tempfile.gettempdir()) if folder is None else folder
        self._next, self._now = at / f"{stem}.next", at / f"{stem}.now"
        self._note = note
        self.waited_s = 0.0  # in total
        self._apart_until_s = 0.0

    def run(self, work: Callable[[], T], /) -> T:
        """Run `work` alone on the GPU, until the GPU is done with it; a `Run`."""
        started_s = time.monotonic()
        if started_s < self._apart_until_s:
            return work()
        with ExitStack() as shift:
            try:
                with held(self._next, wait_s=SHIFT_S, look_every_s=_LOOK_EVERY_S):
                    now = held(self._now, wait_s=SHIFT_S, look_every_s=_LOOK_EVERY_S)
                    shift.enter_context(now)
            except OwnedError as err:
                self._apart_until_s = time.monotonic() + APART_S
                self._note(f"process {err.owner} has not given the GPU back for {SHIFT_S:g} s")
            self.waited_s += time.monotonic() - started_s
            found = work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return found
