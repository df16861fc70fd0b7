"""A kind of model server is known to all who ask for one: its configuration, start and client."""

from __future__ import annotations

from typing import get_args

import pytest

from rlstreams.workers.config.engine import Server
from rlstreams.workers.engines.served.adapters import ADAPTERS
from rlstreams.workers.engines.served.facts import Kind
from tests.servers.fake_server import ROUTES

KINDS = sorted(map(str, Kind))


@pytest.mark.parametrize(
    ("place", "named"),
    {
        "ADAPTERS of workers/engines/served/adapters.py": ADAPTERS,
        "Server of workers/config/engine.py": get_args(Server),
        "ROUTES of tests/servers/fake_server.py": ROUTES,
    }.items(),
)
def test_every_kind_is_named_in(place: str, named: list[str]) -> None:
    assert sorted(map(str, named)) == KINDS, f"{place} must name what Kind has"


def test_every_kind_says_which_version_to_install() -> None:
    assert [kind for kind in Kind if not kind.tested] == []
