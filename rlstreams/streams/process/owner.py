"""A child's notice that its owner is gone: the pipe that is its standard input closes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def when_gone(act: Callable[[], object]) -> None:
    """Call `act`, from another thread, once the owner of this process is gone. Call it once.

    Call it only where `Child` started this process with `Orphaned.DRAINS`. Standard input is empty
    from here on: neither this process nor its children read the pipe by mistake.
    """
    pipe = os.dup(0)  # not for children
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        act()

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
