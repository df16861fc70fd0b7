"""Who listens goes on listening until it is closed."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.listening import LinkServer

DEADLINE_S = 60.0
Served = queue.SimpleQueue[Connection]


@pytest.fixture
def served() -> Served:
    return queue.SimpleQueue()


@pytest.fixture
def door(served: Served) -> Iterator[LinkServer]:
    made = LinkServer("127.0.0.1", served.put, "test")
    yield made
    made.close()
    made.close()
    with pytest.raises(OSError, match="refused"):
        call(made)


def call(door: LinkServer) -> socket.socket:
    return socket.create_connection(door.server_address[:2], DEADLINE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_moment_without_threads_does_not_end_it(
    door: LinkServer, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connects then is cut off and tries again, and is served."""
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with call(door) as first:
        assert b"" == first.recv(1)
    with call(door) as second:
        assert f"127.0.0.1:{second.getsockname()[1]}" == served.get(timeout=DEADLINE_S).peer
    assert len(refused) == 1


def test_a_moment_without_file_descriptors_does_not_end_it(
    door: LinkServer, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connects then is served later."""
    accept, errors = LinkServer.get_request, [errno.EMFILE, errno.ECONNABORTED]

    def fail_first(server: LinkServer) -> tuple[socket.socket, Any]:
        if errors:
            raise OSError(errors.pop(), "as of a process with too many files")
        return accept(server)

    monkeypatch.setattr(LinkServer, "get_request", fail_first)
    with call(door):
        assert served.get(timeout=DEADLINE_S)
    assert not errors
