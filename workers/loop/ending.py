"""The end of a process: it exits even if a compute thread never returns."""

from __future__ import annotations

import os
import threading
import time

EXIT_S = 10.0


def end_within(status: int, limit_s: float = EXIT_S) -> None:
    """Be gone after `limit_s` with `status`; call it only where the process is to end anyway.

    The interpreter joins its threads before it ends: a forward or an optimizer step that is stuck
    would keep a failed process, and its transactional id, for ever.
    """

    def force() -> None:
        time.sleep(limit_s)
        os._exit(status)

    threading.Thread(target=force, name="exit", daemon=True).start()
