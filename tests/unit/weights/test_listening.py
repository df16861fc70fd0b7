"""Who listens goes on listening until it is closed."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlstreams.workers.weights import listening
from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.listening import accept_all

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no room tries again at once."""
    monkeypatch.setattr(listening, "AGAIN_S", 0.001)


class Exhausted(socket.socket):
    """Has no file descriptor left the first times."""

    errors = (errno.EMFILE, errno.ECONNABORTED)
    num_errors = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.num_errors < len(self.errors):
            self.num_errors += 1
            raise OSError(self.errors[self.num_errors - 1], "as of a process with too many files")
        return super().accept()


@contextmanager
def accepting(door: socket.socket) -> Iterator[queue.SimpleQueue[Connection]]:
    """Who is served, until the door is closed: nothing else ends it."""
    served: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    thread = threading.Thread(target=accept_all, args=(door, served.put, "test"))
    thread.start()
    yield served
    door.shutdown(socket.SHUT_RDWR)
    door.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_moment_without_threads_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects then is cut off and tries again, and is served."""
    start, num_refused = threading.Thread.start, 0

    def refuse_once(thread: threading.Thread) -> None:
        nonlocal num_refused
        if thread.name.startswith("test-") and not num_refused:
            num_refused += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    door = socket.create_server(("127.0.0.1", 0))
    with accepting(door) as served:
        with socket.create_connection(door.getsockname(), DEADLINE_S) as refused:
            assert b"" == refused.recv(1)
        with socket.create_connection(door.getsockname(), DEADLINE_S):
            served.get(timeout=DEADLINE_S).close()
    assert num_refused == 1


def test_a_moment_without_file_descriptors_does_not_end_it() -> None:
    """Who connects then is served later."""
    door = Exhausted()
    door.bind(("127.0.0.1", 0))
    door.listen()
    with (
        accepting(door) as served,
        socket.create_connection(door.getsockname(), DEADLINE_S) as caller,
    ):
        link = served.get(timeout=DEADLINE_S)
        assert f"127.0.0.1:{caller.getsockname()[1]}" == link.peer
        link.close()
