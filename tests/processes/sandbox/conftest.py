"""What tests of environments share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlstreams.workers.sandbox.environment import EXTRA, UserEnvironment
from rlstreams.workers.sandbox.user_code import UserCode
from tests.processes.sandbox.games import PLAIN, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Makes environments of a source text, and closes them."""
    made: list[UserEnvironment] = []

    def make(source: str = PLAIN, *, must_reward: bool = False, **changes: Any) -> UserEnvironment:
        file = tmp_path / "game.py"
        file.write_text(source)
        values = {"timeout_s": 60.0, "processes": 1, "concurrency": 8, "memory_mb": 300}
        values |= changes
        code = UserCode(name="Game", kind="class", file=str(file), extra=EXTRA, **values)
        made.append(UserEnvironment(code, must_reward=must_reward, note=lambda _: None))
        return made[-1]

    yield make
    for one in made:
        one.close()
