"""Kills the model server of a rollout worker: the server's process, while its worker lives on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.process import pid_file


def kill_server(worker_log: Path, ordinal: int) -> bool:
    """SIGKILL; False if no server runs now: it is being started again, or not ours.

    Args:
        worker_log: of the rollout worker that minds it; its server's log lies beside it.
    """
    for kind in Kind:
        path = pid_file(worker_log.with_name(f"{kind}-{ordinal}.log"))
        try:
            os.kill(int(path.read_text(encoding="ascii")), signal.SIGKILL)
        except (FileNotFoundError, ValueError, ProcessLookupError):
            continue  # none, or its guard is about to write or remove the file
        return True
    return False
