"""Transfers over gloo between processes, with pullers and senders that die or stand still."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rlstreams.schemas.events import PullRequested
from rlstreams.workers.weights.collective import CollectiveWeightServer
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link.handshake import receiver_key
from rlstreams.workers.weights.sender import SenderDeadlines
from tests.integration.puller_process import ROWS
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
class Stand:
    """A trainer with a published version, and its pullers."""

    server: CollectiveWeightServer
    log: Log
    weights: dict[str, torch.Tensor]
    pullers: list[subprocess.Popen[str]] = field(default_factory=list)

    def puller(self, name: str, number: int = 0) -> subprocess.Popen[str]:
        """A process that is ready to pull."""
        (endpoint,) = self.server.endpoints()
        command = [sys.executable, "-m", "tests.integration.puller_process", endpoint.address]
        command += [name, receiver_key(SECRET, name), str(EPOCH), str(int(number))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pullers.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    def go(self, *pullers: subprocess.Popen[str]) -> None:
        """All connect; then all stand in the log, so that they share one broadcast."""
        for process in pullers:
            process.stdin.write("go\n")
            process.stdin.flush()
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
        for process in made.pullers:
            process.kill()
            process.communicate()
        server.close()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=DEADLINE_S)
    said: dict[str, Any] = json.loads(out)
    return said


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

    said = answer(survivor)
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
    said = answer(survivor)
    assert stopped == "T"
    assert said["kind"] == "link", said
    assert time.monotonic() - started_s < DEADLINE_S / 2


def stopped_state(process: subprocess.Popen[str]) -> str:
    """`T` as soon as it has stopped itself (proc(5), stat)."""
    until_s = time.monotonic() + DEADLINE_S
    state = ""
    while state != "T" and time.monotonic() < until_s:
        state = state_of(process.pid)
        time.sleep(0.01)
    return state
