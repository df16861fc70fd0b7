"""Attaching to a broker that somebody else started: one that serves, starts, or dies."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rlstreams.streams.broker.embedded import BrokerState, EmbeddedBroker
from rlstreams.streams.broker.ports import free_port


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


@pytest.mark.parametrize("num_looks", [0, 3])
def test_a_broker_that_dies_is_not_attached_to(tmp_path: Path, num_looks: int) -> None:
    """`up` and its broker were killed at one instant: its successor still sees the process."""
    dying = state(free_port())
    broker = Found(tmp_path, [*[dying] * num_looks, None])
    assert state(1) == broker.attach_or_start()
    assert 1 == broker.num_starts


def test_a_broker_that_starts_is_waited_for(tmp_path: Path) -> None:
    """Its starter was killed; it goes on starting, and then serves."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = state(listener.getsockname()[1])
        starting = state(free_port())
        broker = Found(tmp_path, [starting, starting, serving])
        assert serving == broker.attach_or_start()
        assert 0 == broker.num_starts
