"""Unit tests run in this process, without a broker; what they wait for comes at once."""

from __future__ import annotations

import pytest

from rlstreams.workers.loop.foreign import ForeignRecords
from tests.brief import brief_polls, no_power_cuts

__all__ = ["brief_polls", "no_power_cuts", "strangers"]


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Positions of the records that readers without a group name in their logs as no events."""
    found: list[str] = []
    monkeypatch.setattr(
        ForeignRecords, "note", lambda _self, raw, _detail: found.append(str(raw.position))
    )
    return found
