"""Whose gateways a worker asks for a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.gateway import neighbours
from rlstreams.workers.gateway.neighbours import Neighbours
from rlstreams.workers.loop.host import host_name
from tests.factories import worker_report
from tests.unit.roles.stand import Stand

NEAR, FAR = "http://127.0.0.1:81", "http://10.0.0.5:80"


def test_those_of_workers_that_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its own, nor another host's loopback, where somebody else may listen, nor that of a
    worker that stopped or is silent."""
    stand = Stand(tmp_path)
    said = [
        ("rollout-0", host_name(), "http://127.0.0.1:80", "working"),
        ("rollout-1", host_name(), NEAR, "working"),
        ("rollout-2", "another", FAR, "working"),
        ("rollout-3", "another", "http://127.0.0.1:82", "working"),
        ("rollout-4", "another", "", "working"),
        ("rollout-5", "another", "http://10.0.0.5:83", "working"),
        ("rollout-5", "another", "http://10.0.0.5:83", "stopped"),
    ]
    for worker, host, address, state in said:
        report = worker_report(worker=worker, host=host, gateway=address, state=state)
        stand.send(outgoing(WORKER_EVENTS, report))
    found = Neighbours(stand.bus(), "rollout-0")
    found.poll()
    assert [NEAR, FAR] == found.addresses()
    monkeypatch.setattr(neighbours, "SILENT_S", -1.0)
    assert [] == found.addresses()
    found.close()
