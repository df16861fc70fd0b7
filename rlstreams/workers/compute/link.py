"""Link between rank 0 and a follower: pickles over a socket pair, or to another host over TCP.

The follower inherits its end from the process that started it. No other process reaches either end
of a pair; `hosts` decides which process may have a TCP connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.priority import COMPUTES
from rlstreams.workers.model.base import VISIBLE

PROGRAM = "rlstreams.workers.compute.follower"
ALIVE = "alive"  # sent by a follower between its answers; or the slow call that it is in
BEGIN, FREE = "begin", "free"  # commands beside the methods of a rank's objects
LOOPBACK = "127.0.0.1"
CUT_OFF_S = 30  # a host that lost network or power closes no connection
Command = tuple[int, str, tuple[Any, ...]]  # number of the object, method, arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result or failure of one command."""

    result: Any = None
    kind: str = ""  # class name of an exception
    failure: str = ""  # its message
    exhausted: tuple[int, str] | None = None  # index and detail of an `OutOfMemoryError`


@dataclass(frozen=True, slots=True)
class Meeting:
    """Place where the ranks of one group find each other; a new one for each group."""

    name: str  # path of a file; with a port: a prefix in rank 0's store
    host: str = ""
    port: int = 0


class Link:
    """One end. Any thread sends; one thread receives."""

    def __init__(self, end: socket.socket, send_limit_s: float) -> None:
        # A stopped peer reads nothing: then sending ends too.
        limit = struct.pack("ll", int(send_limit_s) + 1, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if end.family == socket.AF_INET and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CUT_OFF_S * 1000)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, CUT_OFF_S // 3)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, CUT_OFF_S // 3)
        self._connection = Connection(os.dup(end.fileno()))
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """
        Raises:
            OSError: the other end is closed, or takes nothing (BlockingIOError).
        """
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Any:  # noqa: ANN401
        """The next message; None: the other end is closed."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    @property
    def peer(self) -> object:
        """Address of the other end: IPv4, or empty for a socket pair."""
        return self._end.getpeername()

    def hang_up(self) -> None:
        """Shut the connection down: both ends receive nothing more."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket, once no thread receives."""
        self._connection.close()
        self._end.close()


def start_follower(end: socket.socket, gpu: str, *words: str, program: str) -> Child:
    """Start a follower on this host, at this end of its link, with further arguments of its
    program; it writes to the caller's log."""
    return Child.started(
        [sys.executable, "-m", program, str(end.fileno()), *words],
        orphaned=Orphaned.DIES,
        stdout=2,
        pass_fds=[end.fileno()],
        environment={VISIBLE: gpu} if gpu else {},
        gives_way=COMPUTES,
    )
