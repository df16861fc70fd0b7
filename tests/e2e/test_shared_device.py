"""All three roles on one device, by turns, with kills: nothing is lost, and no turn overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import DeviceLease
from rlstreams.streams.leases import HELD, RELEASED, Leases
from tests.e2e.command import UP_S, Workspace

pytestmark = pytest.mark.slow
CONFIG = """
extends = "infra/examples/demo.toml"

[[devices]]
name = "card"
roles = ["trainer", "rollout", "logprob"]
turn_s = 0.2

[prompts]
evaluate_rows = 16
evaluate_every = 0

[trainer]
steps = 6
groups_per_step = 8
checkpoint_every = 2
"""


def test_roles_take_turns_while_they_are_killed(tmp_path: Path) -> None:
    """The demo's three kills; every event of a lease follows from the one before."""
    workspace = Workspace(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    run = tmp_path / "runs/demo"
    try:
        started = workspace.start_up(f"--run.dir={run}", config="run.toml")
        assert 0 == started.ended_within(UP_S), started.output
        with open_run(run) as log:
            events = [record.event for record in log.read(DeviceLease)]
    finally:
        workspace.close()
    assert "3 processes killed" in started.output
    assert "lost 0, trained twice 0" in started.output
    leases = Leases()
    assert all(leases.apply(event) for event in events)
    by_state = {state: {e.holder for e in events if e.state == state} for state in (HELD, RELEASED)}
    assert by_state[HELD] == {"trainer-0", "rollout-0", "logprob-0"}
    assert by_state[RELEASED] == by_state[HELD]
    assert all(event.seconds > 0 for event in events if event.state == HELD)
