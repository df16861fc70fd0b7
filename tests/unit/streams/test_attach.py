"""Attaching to a broker that somebody else started: one that serves, starts, or dies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.streams.broker.embedded import BrokerState, EmbeddedBroker
from rlstreams.streams.broker.ports import free_port, free_ports, is_free


class Found(EmbeddedBroker):
    """A folder whose broker has these states, one a look."""

    def __init__(self, folder: Path, states: list[BrokerState | None]) -> None:
        super().__init__(folder)
        self.states, self.num_starts = states, 0

    def status(self) -> BrokerState | None:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def start(self) -> BrokerState:
        self.num_starts += 1
        return state(1)


def state(port: int) -> BrokerState:
    return BrokerState(pid=7, port=port, controller_port=2, cluster_id="c")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("num_looks", [0, 2])
@pytest.mark.parametrize("is_listening", [False, True])
def test_a_broker_that_dies_is_not_attached_to(
    tmp_path: Path, listener: socket.socket, num_looks: int, *, is_listening: bool
) -> None:
    """`up` and its broker were killed at one instant: its successor still sees the process, and the
    kernel may still take connections for it."""
    dying = state(listener.getsockname()[1] if is_listening else free_port())
    broker = Found(tmp_path, [*[dying] * num_looks, None])
    assert state(1) == broker.attach_or_start()
    assert 1 == broker.num_starts


def test_a_broker_that_starts_is_waited_for(tmp_path: Path, listener: socket.socket) -> None:
    """Its starter was killed; it goes on starting, and then answers."""

    def answer() -> None:
        with listener.accept()[0] as connection:
            connection.recv(100)
            connection.sendall(b"\0\0\0\6")

    thread = threading.Thread(target=answer)
    thread.start()
    serving = state(listener.getsockname()[1])
    starting = state(free_port())
    broker = Found(tmp_path, [starting, starting, serving])
    assert serving == broker.attach_or_start()
    assert 0 == broker.num_starts
    thread.join()


def test_ports_are_different_and_out_of_reach_of_outgoing_connections() -> None:
    """Of a server that starts in a minute, or again, no client's connection takes the port."""
    found = free_ports(20)
    assert 20 == len({*found})
    assert all(20_000 <= port < 32_000 and is_free(port) for port in found)
