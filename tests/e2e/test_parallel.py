"""A trainer of two ranks in a whole run: each of its processes is killed once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import UP_S, Started, Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = Workspace(tmp_path)
    yield made
    made.close()


def follower(workspace: Workspace, started: Started, before: int = 0) -> tuple[int, int]:
    """The process of rank 1 and that of rank 0, once there is another one than `before`."""
    deadline_s = time.monotonic() + UP_S
    while time.monotonic() < deadline_s:
        assert started.process.poll() is None, started.output
        for process in workspace.processes():
            try:
                words = Path(f"/proc/{process}/cmdline").read_bytes()
                status = Path(f"/proc/{process}/status").read_text("utf-8")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"parallel.follower" in words and process != before:
                return process, int(re.findall(r"PPid:\s+(\d+)", status)[0])
        time.sleep(0.05)
    raise AssertionError(f"no follower:\n{started.output}")


def test_a_trainer_of_two_ranks_survives_the_death_of_each(workspace: Workspace) -> None:
    """Redone steps have the recorded hashes, the audit is clean, no process is left."""
    asked = ("--trainer.ranks=2", "--steps=8", "--demo.kills=[]", "--prompts.evaluate_every=0")
    started = workspace.start_up(*asked)
    started.wait_for_step(3)
    rank_1, _ = follower(workspace, started)
    os.kill(rank_1, signal.SIGKILL)
    started.wait_for_step(6)
    _, rank_0 = follower(workspace, started, before=rank_1)
    os.kill(rank_0, signal.SIGKILL)
    assert 0 == started.ended_within(UP_S), started.output
    log = (workspace.folder / "runs/demo/logs/trainer-0.log").read_text("utf-8")
    assert f"rank 1 of the trainer (process {rank_1}) was killed by SIGKILL" in log
    redone = re.findall(r"(\d+) of (\d+) weight hashes equal", started.output)
    assert redone
    assert all(equal == of for equal, of in redone)
    audit = workspace.run("rlstreams", "audit", "runs/demo")
    assert 0 == audit.returncode, audit.stdout
    assert {} == {p: n for p, n in workspace.processes().items() if "python" in n}
