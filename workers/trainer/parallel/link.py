"""Link between rank 0 and a follower: pickles over a socket pair.

The follower inherits its end from the trainer that started it: no port is open, and nobody else
reaches either end.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

ALIVE = "alive"  # what a follower sends between its answers
BEGIN, FREE = "begin", "free"  # commands beside the methods of `RankLearner`
PASSES = (
    "local_gradient",
    "local_look",
    "local_scores",
    "take",
)  # in which the ranks wait for each other
Command = tuple[str, tuple[Any, ...]]  # method, arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a command."""

    result: Any = None
    kind: str = ""  # of an exception
    failure: str = ""  # its message
    exhausted: tuple[int, str] | None = None  # of an `OutOfMemoryError`


class Link:
    """One end. Any thread sends; one thread receives."""

    def __init__(self, end: socket.socket, send_limit_s: float) -> None:
        # Whoever is stopped reads nothing: sending ends then too.
        limit = struct.pack("ll", int(send_limit_s) + 1, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection = Connection(end.detach())
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """
        Raises:
            OSError: the other end is gone, or takes nothing (BlockingIOError).
        """
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Any:  # noqa: ANN401
        """The next message; None: the other end is gone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Release it, once nobody receives."""
        self._connection.close()
