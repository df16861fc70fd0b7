"""A filled store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.weights.stores import put, storing


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Versions 0 to 9, anchors at 0, 4 and 8."""
    with storing(tmp_path / "store") as writer:
        put(writer, *range(10))
    return tmp_path / "store"
