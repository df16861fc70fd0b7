"""Transfers over gloo between processes, with pullers and senders that die or stand still."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from rlstreams.schemas.events import PullRequested
from rlstreams.workers.weights.collective import CollectiveWeightServer
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link.handshake import receiver_key
from rlstreams.workers.weights.sender import SenderDeadlines
from tests.integration import worker_process
from tests.integration.puller_process import ROWS, pull
from tests.proc import state_of

SECRET, EPOCH = "secret", 3
STALL_S = 3.0
DEADLINE_S = 120.0


@dataclass
class Log:
    """What the server told."""

    lines: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)

    def info(self, event: str, **fields: object) -> None:
        self.lines.put({"event": event, **fields})

    warning = info

    def wait(self, event: str) -> dict[str, Any]:
        """The next one of a kind."""
        until_s = time.monotonic() + DEADLINE_S
        while True:
            line = self.lines.get(timeout=max(0.01, until_s - time.monotonic()))
            if line["event"] == event:
                return line


@dataclass
class Puller:
    """A process, and the way to it."""

    process: BaseProcess
    end: Connection

    def said(self) -> Any:
        assert self.end.poll(DEADLINE_S), "it says nothing"
        return self.end.recv()


@dataclass
class Stand:
    """A trainer with a published version, and its pullers."""

    server: CollectiveWeightServer
    log: Log
    weights: dict[str, torch.Tensor]
    pullers: list[Puller] = field(default_factory=list)

    def puller(self, name: str, number: int = 0) -> Puller:
        """A process that is ready to pull, forked from one that has torch."""
        (endpoint,) = self.server.endpoints()
        processes = multiprocessing.get_context("forkserver")
        # One fork server forks all of this folder's: whoever starts it has it know both.
        processes.set_forkserver_preload([pull.__module__, worker_process.__name__])
        ours, theirs = multiprocessing.Pipe()
        given = (theirs, endpoint.address, name, receiver_key(SECRET, name), EPOCH, int(number))
        made = Puller(processes.Process(target=pull, args=given), ours)
        made.process.start()
        theirs.close()
        self.pullers.append(made)
        assert made.said() == "ready"
        return made

    def go(self, *pullers: Puller) -> None:
        """All connect; then all stand in the log, so that they share one broadcast."""
        for puller in pullers:
            puller.end.send("go")
        for _ in pullers:
            self.log.wait("puller_joined")
        for index in range(len(self.pullers)):
            self.server.serve(
                PullRequested(
                    worker=f"rollout-{index}",
                    instance="i",
                    role="rollout",
                    request_id=f"i/{index}",
                    policy_version=0,
                    channel="gloo",
                    address=f"receiver{index}",
                    requested_at_ms=0,
                )
            )


@pytest.fixture(params=[STALL_S])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    log = Log()
    limits = SenderDeadlines(window_s=2.0, form_s=60.0, stall_s=request.param)
    server = CollectiveWeightServer("gloo", host="127.0.0.1", secret=SECRET, log=log, limits=limits)
    server.open(EPOCH)
    weights = {name: torch.randn(shape) for name, _, shape in ROWS}
    server.publish(0, weights)
    made = Stand(server, log, weights)
    try:
        yield made
    finally:
        for puller in made.pullers:
            puller.process.kill()
            puller.process.join(DEADLINE_S)
            puller.end.close()
        server.close()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP]
)
def test_a_puller_lost_in_the_middle_stalls_nobody_beyond_a_deadline(
    stand: Stand, number: signal.Signals
) -> None:
    """The other puller gets the version, the trainer publishes on, and the lost one is named."""
    survivor, victim = stand.puller("receiver0"), stand.puller("receiver1", number)
    stand.go(survivor, victim)
    started_s = time.monotonic()
    stand.server.publish(1, stand.weights)
    published_s = time.monotonic() - started_s

    said = survivor.said()
    lost = stand.log.wait("puller_lost")

    assert said.get("hash") == weight_hash(stand.weights), said
    assert "rollout-1, receiver receiver1" in lost["puller"]
    assert said["seconds"] < DEADLINE_S
    assert published_s < DEADLINE_S  # a copy and a hash: no wait for anybody


@pytest.mark.parametrize("stand", [DEADLINE_S], indirect=True)
def test_a_sender_that_ends_is_noticed_at_once(stand: Stand) -> None:
    """A puller in the middle of a transfer, held up by another one, does not wait it out."""
    survivor, victim = stand.puller("receiver0"), stand.puller("receiver1", signal.SIGSTOP)
    stand.go(survivor, victim)
    stopped = stopped_state(victim)
    started_s = time.monotonic()
    stand.server.close()
    said = survivor.said()
    assert stopped == "T"
    assert said["kind"] == "link", said
    assert time.monotonic() - started_s < DEADLINE_S / 2


def stopped_state(puller: Puller) -> str:
    """`T` as soon as it has stopped itself (proc(5), stat)."""
    until_s = time.monotonic() + DEADLINE_S
    state = ""
    while state != "T" and time.monotonic() < until_s:
        state = state_of(puller.process.pid)
        time.sleep(0.01)
    return state
