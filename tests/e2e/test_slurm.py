"""A job of Slurm as a whole run: two nodes, a requeue in the middle, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlstreams.schemas.events import StepCompleted, Trajectory
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.run.open_run import open_run
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.workers import JOINED_FROM
from tests.e2e.command import CONFIG, MARK, Workspace
from tests.hosts.slurm import Slurm

pytestmark = pytest.mark.slow
NODES = ("n1", "n2")
JOINED = f"rollout-{JOINED_FROM}"
# Samples wait a second for their transaction, so the joiner has the processor to start.
WORDS = (
    CONFIG, "--trainer.groups_per_step=4", "--prompts.evaluate_rows=8", "--demo.kills=[]",
    "--rollout.commit_interval_s=1",
)  # fmt: skip
NO_END = 2000  # steps: the first job is ended by its time
LIMIT_S = 240.0
DRAIN_S = "10"
LEFT_S = 20.0
REQUEUED_STEPS = 3  # that the second job does


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    workspace.close()


def opened(folder: Path, job: subprocess.Popen[bytes], output: Path) -> RunLog:
    """The run's log, as soon as there is one."""
    until_s = time.monotonic() + LIMIT_S
    while job.poll() is None and time.monotonic() < until_s:
        with suppress(StreamsError):
            return open_run(folder)
        time.sleep(0.5)
    raise AssertionError(f"no log that can be read:\n{output.read_text('utf-8')}")


def steps_once_it_joined(log: RunLog) -> int:
    """The last step, once there is one and the second node has sampled."""
    last, has_joined = 0, False
    for record in log.follow(StepCompleted, Trajectory, deadline_s=LIMIT_S, from_start=True):
        if isinstance(record.event, StepCompleted):
            last = record.event.step
        else:
            has_joined |= record.event.worker == JOINED
        if last and has_joined:
            return last
    raise AssertionError(f"{LIMIT_S:g} s: step {last}, {JOINED} sampled: {has_joined}")


def nothing_left(workspace: Workspace) -> None:
    """No process of the job; a fork server ends a moment after its `up`."""
    until_s = time.monotonic() + LEFT_S
    while left := workspace.processes():
        assert time.monotonic() < until_s, left
        time.sleep(0.2)


def test_a_job_that_is_queued_again_goes_on_to_its_end(
    workspace: Workspace, tmp_path: Path
) -> None:
    """Its time runs out, all drain and it is queued again; the next job does the last steps, ends
    by itself, and takes its workers along. Nothing is lost or trained twice."""
    command = f'#!/bin/bash\nexec {Path(sys.executable).parent}/rlstreams "$@"\n'
    slurm = Slurm(tmp_path / "slurm", NODES, {"rlstreams": command})
    run, output = slurm.folder / "runs/demo", slurm.folder / "output"
    own = {"RUN": "demo", "PORT": str(free_ports(1)[0]), "DRAIN_S": DRAIN_S, MARK: workspace.mark}

    def job(steps: int) -> subprocess.Popen[bytes]:
        return slurm.batch(*WORDS, f"--trainer.steps={steps}", **own, OMP_NUM_THREADS="1")

    first = job(NO_END)
    with opened(run, first, output) as log:
        steps_once_it_joined(log)
    os.kill(first.pid, signal.SIGTERM)  # the batch script alone: `--signal=B:TERM@600`
    assert first.wait(LIMIT_S) == 0, output.read_text("utf-8")
    assert slurm.noted("requeued") == ["7"]
    nothing_left(workspace)
    with open_run(run) as log:
        done = [step.step for step in log.steps()][-1]
    second = job(done + REQUEUED_STEPS)
    assert second.wait(LIMIT_S) == 0, output.read_text("utf-8")
    assert slurm.noted("requeued") == ["7"]
    nothing_left(workspace)
    assert Counter(line.split()[0] for line in slurm.noted("steps")) == {"n1": 2, "n2": 2}
    with open_run(run) as log:
        steps = list(log.steps())
        assert not audit(log.bus).breaches
    assert [step.step for step in steps] == [*range(1, done + REQUEUED_STEPS + 1)]
    assert {step.epoch for step in steps} == {1, 2}
