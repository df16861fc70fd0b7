"""What this host calls itself: reports, claims and logs carry it, so that a worker can be found."""

from __future__ import annotations

import os
import socket

VARIABLE = "RLSTREAMS_HOST"  # where the host's own name says nothing, as in a pod


def host_name() -> str:
    """The name that `RLSTREAMS_HOST` gives it, else its own."""
    return os.environ.get(VARIABLE, "") or socket.gethostname()
