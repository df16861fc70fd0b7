"""A process that stands still without dying: `up` names it and ends by itself."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import Workspace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

STALL_S = 15.0  # a busy machine has pauses of its own
DRAIN_S = 1.0
WORDS = (
    "--steps", "500", "--trainer.groups_per_step=4", "--prompts.evaluate_rows=8", "--demo.kills=[]",
    f"--deadlines.stall_s={STALL_S:g}", f"--deadlines.drain_s={DRAIN_S:g}",
)  # fmt: skip
# To notice, to drain (a stopped process is killed 10 s beyond drain_s), to stop the broker.
END_S = STALL_S + DRAIN_S + 240.0
TOLD_S = 120.0


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    workspace.close()


def process_of(workspace: Workspace, worker: str) -> int:
    """The process that writes this worker's log."""
    log = f"/logs/{worker}.log"
    for pid in workspace.processes():
        output = Path(f"/proc/{pid}/fd/1")
        if output.exists() and str(output.readlink()).endswith(log):
            return pid
    raise AssertionError(f"no process writes {log}")


def test_a_stopped_worker_is_named_and_ends_the_run(workspace: Workspace) -> None:
    """Silence is told in seconds; then the hop, in the summary and in the report."""
    started = workspace.start_up(*WORDS)
    started.wait_for_step(2)
    os.kill(process_of(workspace, "logprob-0"), signal.SIGSTOP)
    since_s = time.monotonic()
    while "no report from logprob-0 for" not in started.output:
        assert time.monotonic() < since_s + TOLD_S, started.output
        time.sleep(0.1)
    assert 1 == started.ended_within(END_S)
    reason = next(
        line.removeprefix("the run stopped: ")
        for line in started.output.splitlines()
        if line.startswith("the run stopped: ")
    )
    # Where it was stopped is chance: between two transactions, or in the middle of one.
    assert re.search(
        "blocked at logprob: (no report from logprob-0 for .* unscored|logprob-0 has had a "
        "transaction open for)",
        reason,
    )
    page = (workspace.folder / "runs/demo/report.html").read_text("utf-8")
    assert "blocked at logprob: " in page
    assert "lost 0, trained twice 0" in started.output
