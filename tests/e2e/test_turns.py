"""A rollout worker that is killed in the middle of an episode: its samples stay whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import Trajectory
from tests.e2e.command import UP_S, Workspace
from tests.e2e.test_stalls import process_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]
# The second turn is answered only once there is a gate.
ENVIRONMENT = """
import asyncio, os, pathlib

class Gate:
    def __init__(self, prompt, answer, metadata, *, folder):
        self.prompt, self.folder = prompt, pathlib.Path(folder)

    async def step(self, completion, turn):
        if turn == 1:
            return self.prompt
        with open(self.folder / "second", "a") as file:
            print(os.getpid(), file=file)
        while not (self.folder / "gate").exists():
            await asyncio.sleep(0.02)
        return float(completion.count(",")), {"said": 1.0}
"""
CONFIG = """
extends = "infra/examples/demo.toml"

[environment]
name = "gate.py:Gate"
options = {{ folder = "{folder}" }}
max_turns = 2
timeout_s = 300.0
processes = 1

[reward]
verifier = "environment"

[prompts]
evaluate_rows = 8

[demo]
kills = []

[trainer]
steps = 2
groups_per_step = 4
"""


def test_a_worker_killed_between_two_turns_loses_nothing_and_publishes_no_half(
    tmp_path: Path,
) -> None:
    """Its samples begin again from the first turn; the audit is clean, and each step's metrics have
    the parts of the reward and the rate of the warm-up."""
    workspace = Workspace(tmp_path)
    (tmp_path / "gate.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    run = tmp_path / "runs/demo"
    second = tmp_path / "second"
    try:
        started = workspace.start_up(f"--run.dir={run}", config="run.toml")
        _until(second.exists, lambda: f"no second turn:\n{started.output}")
        first = set(second.read_text().split())
        os.kill(process_of(workspace, "rollout-0"), signal.SIGKILL)
        _until(
            lambda: bool(set(second.read_text().split()) - first),
            lambda: f"nobody began again:\n{started.output}",
        )
        (tmp_path / "gate").touch()
        assert 0 == started.ended_within(UP_S), started.output
        audit = workspace.run("rlstreams", "audit", str(run))
        assert 0 == audit.returncode, audit.stdout
        with open_run(run) as log:
            trajectories = [record.event for record in log.read(Trajectory)]
            metrics = [step.metrics for step in log.steps()]
    finally:
        workspace.close()
    assert "lost 0, trained twice 0" in started.output
    authors = [[s.author for s in one.segments] for one in trajectories]
    # A first turn that was cut has no second one; no sample ends with the environment's words.
    assert [["prompt", "policy", "environment", "policy"]] == [
        one for n, one in enumerate(authors) if len(one) == 4 and one not in authors[:n]
    ]
    assert {"policy"} == {one[-1] for one in authors}
    # Five steps of warm-up: step n has n fifths of the demo's rate.
    assert [4e-5, 8e-5] == [round(step["lr"], 7) for step in metrics]
    assert all("reward/said" in step for step in metrics), metrics


def _until(reached: Callable[[], bool], what: Callable[[], str]) -> None:
    until_s = time.monotonic() + UP_S
    while not reached():
        assert time.monotonic() < until_s, what()
        time.sleep(0.05)
