"""Where a worker's agents from elsewhere find it, also after its death."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from rlstreams.streams.broker.ports import free_ports
from rlstreams.workers.agents.asking import Runners
from rlstreams.workers.agents.outside import OutsideAgent
from rlstreams.workers.config.agents import AgentSection, GatewaySection
from rlstreams.workers.gateway.keys import Keys


def test_a_worker_that_starts_again_listens_where_it_did(tmp_path: Path) -> None:
    """A client keeps address and key; where somebody else listens now, any free port has to do."""

    def runners() -> Runners:
        agent = OutsideAgent(AgentSection(name="own", outside=True), tmp_path)
        return Runners([agent], Keys("secret"), GatewaySection())

    assert 0 == runners().door[1]
    (port,) = free_ports(1)
    runners().listening(port)
    assert f":{port}/" in json.loads((tmp_path / "clients.json").read_text("utf-8"))["url"]
    assert port == runners().door[1]
    with socket.create_server(("127.0.0.1", port)):
        assert 0 == runners().door[1]
    (tmp_path / "clients.json").write_text('{"url": 1}', "utf-8")
    assert 0 == runners().door[1]
