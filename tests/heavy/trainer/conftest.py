"""Ranks of these tests are forks of one process that has torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlstreams.workers.compute import team
from tests.heavy import forked_ranks


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """All but those of a module that says `RANKS_OF_THEIR_OWN`."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "RANKS_OF_THEIR_OWN", False):
            patch.setattr(team, "_started", forked_ranks.started)
            patch.setattr(team, "Child", forked_ranks.HostsChild)
        yield
