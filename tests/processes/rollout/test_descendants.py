"""What user code starts in a session of its own ends with the process that held the code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.make_verifier import make_verifier
from tests.contract.polling import within

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descendants are found by /proc")
ROOT = Path(__file__).parents[3]
# The reward is the number of a process that no signal to the verifier's session reaches.
GRADE = """
import subprocess
def grade(prompt, completion, answer, metadata):
    command = ["setsid", "sh", "-c", "echo $$; exec sleep 3600"]
    return int(subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline())
"""
WORKER = """
import sys, time
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.make_verifier import make_verifier
verifier = make_verifier(RewardSection(verifier=sys.argv[1], processes=1, timeout_s=60.0))
print(int(verifier.judge("", "", "", {}, "stop").reward), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def grade(tmp_path: Path) -> str:
    file = tmp_path / "grade.py"
    file.write_text(GRADE)
    return f"{file}:grade"


def has_ended(pid: int) -> Callable[[], bool | None]:
    def look() -> bool | None:
        try:
            return (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" or None
            )
        except FileNotFoundError:
            return True

    return look


def test_it_ends_when_the_verifier_is_closed(grade: str) -> None:
    """By the worker, as at a drain and after a deadline that was missed."""
    with make_verifier(RewardSection(verifier=grade, processes=1, timeout_s=60.0)) as verifier:
        pid = int(verifier.judge("", "", "", {}, "stop").reward)
        assert not has_ended(pid)()
    within(30, has_ended(pid), f"the end of process {pid}")


def test_it_ends_when_the_worker_is_killed(grade: str) -> None:
    """By the verifier's process, which sees its link close."""
    command = [sys.executable, "-c", WORKER, grade]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert not has_ended(pid)()
        os.kill(worker.pid, signal.SIGKILL)
    within(30, has_ended(pid), f"the end of process {pid}")
