"""No crash point outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlstreams.streams.log import crash_points


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    crash_points.arm(None)
