"""A role is known to all who ask for one: its start, its rights, its agreement with the claim."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from rlstreams.streams.log.roles import ROLES, STAGES
from rlstreams.streams.log.topics import CONTROL, TOPICS, WORKER_EVENTS
from rlstreams.up.supervisor.fleet import num_workers
from rlstreams.workers.bootstrap.parts import MAKERS
from rlstreams.workers.config.operation import Kill
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import COMPUTED_WITH
from tests.unit.roles.stand import EXAMPLE

WORKERS = EXAMPLE.parents[2] / "rlstreams/workers"
PLACES = {
    "a folder of workers/ with its worker.py": [p.parent.name for p in WORKERS.glob("*/worker.py")],
    "MAKERS of workers/bootstrap/parts.py": MAKERS,
    "COMPUTED_WITH of workers/loop/agreement.py": [*COMPUTED_WITH, "trainer"],  # it is the claim's
    "Kill.role of workers/config/operation.py": get_args(get_type_hints(Kill)["role"]),
    "written_by of WORKER_EVENTS in streams/log/topics.py": WORKER_EVENTS.written_by,
    "read_by of CONTROL in streams/log/topics.py": {*CONTROL.read_by} - {"up"},
    "num_workers of up/supervisor/fleet.py": num_workers(RunConfig()),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_role_has(place: str) -> None:
    assert sorted(PLACES[place]) == sorted(ROLES), f"{place} must be of the roles in ROLES"


def test_the_table_of_topics_names_roles_and_tools_alone() -> None:
    tools = {"up", "operator", "audit", "views", "recorder", "any"}
    named = {name for topic in TOPICS for name in (*topic.written_by, *topic.read_by)}
    assert named - tools == set(ROLES)
    assert set(STAGES) <= set(ROLES)
