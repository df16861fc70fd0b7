"""Accepts connections, each in its own thread, for as long as a socket listens."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable

from rlstreams.workers.weights.link.frames import Connection

AGAIN_S = 0.1
_CLOSED = (errno.EINVAL, errno.EBADF)


def accept_all(listening: socket.socket, serve: Callable[[Connection], None], name: str) -> None:
    """Until `listening` is closed. Anything else ends one connection at the most: where no file
    descriptor or thread is free now, one will be."""
    while True:
        try:
            sock, peer = listening.accept()
        except OSError as err:
            if err.errno in _CLOSED or listening.fileno() < 0:
                return
            time.sleep(AGAIN_S)
            continue
        link = Connection(sock, f"{peer[0]}:{peer[1]}")
        thread = threading.Thread(
            target=serve, args=(link,), name=f"{name}-{link.peer}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread is free now: the caller tries again
            link.close()
            time.sleep(AGAIN_S)
