"""A world of fake servers: versions in a folder, servers that are closed in the end."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests.contract.engine_rigs import announced, driven
from tests.fake_engine import fake_weights
from tests.servers.fake_server import FakeServer
from tests.servers.served import served_engine


class World:
    """Fake servers and the versions that they may pull."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.channel = FileWeightChannel()
        self.weights = FileWeightServer(folder / "weights", keep=9)
        self.servers: list[FakeServer] = []

    def serve(
        self, flavour: str = "vllm-0.32.0", *, step_s: float = 0.0, has_plugin: bool = False
    ) -> FakeServer:
        self.servers.append(FakeServer(flavour, step_s=step_s, has_plugin=has_plugin))
        return self.servers[-1]

    def publish(self, version: int) -> PolicyPublished:
        return self.publish_as(version, seed=version)

    def publish_as(self, version: int, *, seed: int) -> PolicyPublished:
        """With the weights of another version."""
        return announced(self.weights, self.weights.publish(version, fake_weights(seed)))

    def engine(self, **changes: Any) -> AbstractAsyncContextManager[ServedEngine]:
        """An engine of all servers, while it runs."""
        return driven(served_engine(self.servers, self.folder, **changes))

    def close(self) -> None:
        for server in self.servers:
            server.close()
