"""A handle on a process that is no child of ours, and whose id may be given to another one."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class ProcessHandle:
    """One process, from now on. Make it while the process is known to live."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = -1
        self._is_over = False
        opened = getattr(os, "pidfd_open", None)  # Linux: stays with this process, ended or not
        if opened is not None:
            with suppress(OSError):  # it has ended already, or the kernel has none
                self._fd = opened(pid)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; one that only waits to be reaped has."""
        if self._is_over:
            return False
        if self._fd >= 0:
            ended = select.poll()  # `select` takes no number above 1,023
            ended.register(self._fd, select.POLLIN)
            return not ended.poll(0)
        try:
            os.kill(self._pid, 0)
        except OSError:  # nobody, or somebody else by now
            return False
        return True

    def close(self) -> None:
        """It has ended; idempotent."""
        self._is_over = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
