"""Unit tests run in this process, without a broker; what they wait for comes at once."""

from __future__ import annotations

import pytest

from workers import stage


@pytest.fixture(autouse=True)
def brief_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role with nothing to read waits for records; of a log in memory nothing is on its way."""
    monkeypatch.setattr(stage, "IDLE_S", 0.002)
