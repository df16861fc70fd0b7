"""Each test has a world of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.workers.engines.served import engine
from tests.brief import no_power_cuts
from tests.servers.world import World

__all__ = ["no_power_cuts"]


@pytest.fixture(autouse=True)
def brief_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is up at once."""
    monkeypatch.setattr(engine, "_POLL_S", 0.002)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()
