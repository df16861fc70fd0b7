"""What a worker says of itself over HTTP: its load, and whether its loop still comes round."""

from __future__ import annotations

import json
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.loop import health as module
from rlstreams.workers.loop.health import Health
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import Stand, tick_until


def asked(port: int, path: str) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_a_scorer_tells_its_load_and_a_loop_that_stands_is_unwell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first report it is starting; a path that is not there is 404."""
    stand, health = Stand(tmp_path), Health("logprob-0")
    stand.publish(3)
    context = replace(stand.context("logprob"), on_report=health.report)
    role = make_worker(context, context.bus, FakeScorer(), FileWeightChannel())
    with health.served("127.0.0.1", 0) as port:
        assert asked(port, "/load") == (200, {"worker": "logprob-0", "state": "starting"})
        tick_until(role, lambda: asked(port, "/load")[1].get("versions") == [3])
        load = asked(port, "/load")[1]
        assert (load["role"], load["policy_version"], load["open"]) == ("logprob", 3, 0)
        assert "counters" in load
        status, found = asked(port, "/health")
        assert (200, True) == (status, found["ok"])
        assert 404 == asked(port, "/metrics")[0]
        monkeypatch.setattr(module, "SILENT_S", 0.0)
        assert 200 == asked(port, "/health")[0]  # its loop has not begun
        health.beat()
        status, found = asked(port, "/health")
        assert (503, False) == (status, found["ok"])
        with (
            pytest.raises(ConfigError, match=rf"--health-port 127.0.0.1:{port} cannot be had"),
            health.served("127.0.0.1", port),
        ):
            pass
    role.close()
