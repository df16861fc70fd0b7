"""All roles on one device, in shifts, with kills: nothing is lost, and no shift overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import DeadLetter, DeviceLease, Trajectory
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.leases import HELD, RELEASED, Leases
from tests.e2e.command import UP_S, Workspace
from tests.servers.judge_python import write_python

pytestmark = pytest.mark.slow
CONFIG = """
extends = "infra/examples/demo.toml"

[[devices]]
name = "card"
roles = ["trainer", "rollout", "logprob", "judge"]
turn_s = 0.2

[judge]
model = "{folder}"
python = "{folder}/python"
port = {port}

[reward]
verifier = "judge"

[prompts]
evaluate_rows = 16
evaluate_every = 0

[trainer]
steps = 4
groups_per_step = 8
checkpoint_every = 2

[demo]
kills = [
  {{ role = "rollout", at = 0.25 }},
  {{ role = "server", at = 0.5 }},
  {{ role = "trainer", at = 0.75 }},
]
"""


def test_roles_have_shifts_while_they_are_killed(tmp_path: Path) -> None:
    """A judge's server that sleeps is never asked, or it would end; every event of a lease follows
    from the one before."""
    workspace = Workspace(tmp_path)
    write_python(tmp_path / "python", right=r"graded:\\n1", wrong=r"It is not.\n0.25")
    (port,) = free_ports(1)
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path, port=port))
    run = tmp_path / "runs/demo"
    try:
        started = workspace.start_up(f"--run.dir={run}", config="run.toml")
        assert 0 == started.ended_within(UP_S), started.output
        with open_run(run) as log:
            events = [record.event for record in log.read(DeviceLease)]
            rewards = {record.event.reward for record in log.read(Trajectory)}
            letters = [record.event.detail for record in log.read(DeadLetter)]
        audit = workspace.run("rlstreams", "audit", str(run))
    finally:
        workspace.close()
    assert "3 processes killed" in started.output
    assert "lost 0, trained twice 0" in started.output
    leases = Leases()
    assert all(leases.apply(event) for event in events)
    by_state = {state: {e.holder for e in events if e.state == state} for state in (HELD, RELEASED)}
    assert by_state[HELD] == {"trainer-0", "rollout-0", "logprob-0", "server-0"}
    assert by_state[RELEASED] == by_state[HELD]
    assert all(event.seconds > 0 for event in events if event.state == HELD)
    assert rewards == {0.25, 0.75}
    assert not letters
    assert 0 == audit.returncode, audit.stdout
    slept = (run / "logs/server-0.log").read_text()
    assert "with status 9" not in slept
