"""Workers that are stopped and wake up, with a successor and without, on a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.loop.runtime import Exit
from tests.integration.test_roles_on_broker import DEADLINE_S, SLOW_S, Site, end

SESSION_S = 3.0  # of the embedded broker's groups
TRANSACTION_S = 1.0
CLEAN_UP_S = 1.0  # how often the broker looks for transactions that took too long


def send(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def wait_until_stopped(process: BaseProcess) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    asked = ["ps", "-o", "stat=", "-p", str(process.pid)]
    while "T" not in subprocess.run(asked, capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline_s, "it did not stop"
        time.sleep(0.02)


@pytest.mark.parametrize("role", ["rollout", "logprob"])
def test_a_worker_that_was_stopped_adds_nothing_beside_its_successor(
    broker: str, run_id: str, tmp_path: Path, role: str
) -> None:
    """Stopped beyond session and transaction timeout, it wakes up to a fence: status 75."""
    site = Site(broker, run_id, tmp_path, num_groups=60)
    if role == "logprob":
        with site.worker() as process:
            site.wait_for(len(site.samples))
            assert Exit.DONE == end(process)
        site.close()
        site.follow(SCORED.name)
    # Scoring is so quick that from outside it might be stopped too late: it stops itself, with a
    # window that is scored and not committed.
    freeze = "freeze:forward.after" if role == "logprob" else ""
    with site.worker(role, freeze, TRANSACTION_S, step_s=SLOW_S) as zombie:
        if freeze:
            wait_until_stopped(zombie)
        else:
            site.wait_for(4)
            send(zombie, signal.SIGSTOP)
        at_stop = len(site.found())
        stopped_s = time.monotonic()
        with site.worker(role) as successor:
            site.wait_for(at_stop + 8)
            time.sleep(max(0.0, stopped_s + SESSION_S + 0.5 - time.monotonic()))
            send(zombie, signal.SIGCONT)
            zombie.join(DEADLINE_S)
            assert Exit.FENCED == zombie.exitcode
            site.wait_for(len(site.samples))
            assert Exit.DONE == end(successor)
    assert at_stop < len(site.samples), "it was stopped too late to mean anything"
    assert dict.fromkeys(site.samples, 1) == site.found()
    site.close()


def test_a_worker_that_stalls_in_a_transaction_comes_back_by_itself(
    broker: str, run_id: str, tmp_path: Path
) -> None:
    """The broker gives its transaction up, it ends with 75, and its next start finishes."""
    stall_s = TRANSACTION_S + 2 * CLEAN_UP_S + 0.5
    site = Site(broker, run_id, tmp_path, num_groups=20)
    with site.worker("rollout", f"commit.before:6:stop:{stall_s}", TRANSACTION_S) as process:
        process.join(DEADLINE_S)
        assert Exit.FENCED == process.exitcode
    with site.worker() as process:
        site.wait_for(len(site.samples))
        assert Exit.DONE == end(process)
    assert dict.fromkeys(site.samples, 1) == site.found()
    site.close()
