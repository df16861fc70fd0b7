"""Priority where cores are scarce: the log, and what reads and writes it, before what computes.

A model server or a trainer on the CPU uses every core it finds, and beside it Kafka's many short
pieces of work come too late: a broker that gets no core for seconds fences itself, and commits
time out. So whatever computes gives way; on a machine with a core to spare that changes nothing
(decision 0103).

Linux weighs a session as a whole (`autogroup`, see `man 7 sched`): inside one, `nice` orders its
own processes only, so both are set. Either can be lowered without a right, never raised again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

COMPUTES = 5  # a third of the weight of a process that does not give way


def give_way(by: int, pid: int = 0) -> None:
    """Lower the priority of a process, and of its session unless that is a terminal's.

    What it starts in that session inherits it. Nothing is raised: where the system refuses, the
    process stays as it is.

    Args:
        by: steps of `nice`, 1 to 19.
        pid: the process: a child in a session of its own; 0: this process.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, by)
        if pid or os.getsid(0) == os.getpid():
            Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(by), encoding="ascii")
