"""A pytest that is killed leaves no broker, server or run behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import SESSION
from tests.marked import kill_marked, marked
from tests.processes.process.test_child import until

ROOT = Path(__file__).parents[3]
# Started as a broker is: in a session of its own, to outlive its owner.
TEST = """
import os, time
from pathlib import Path
from rlstreams.streams.process.child import Child, Orphaned

def test_waits():
    child = Child.started(["sleep", "3600"], orphaned=Orphaned.LIVES)
    Path("begun.tmp").write_text(f"{child.pid} {os.environ['RLSTREAMS_TEST_SESSION']}")
    Path("begun.tmp").rename("begun")
    time.sleep(3600)
"""


def test_what_a_killed_pytest_started_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(TEST)
    words = ["-q", "-p", "tests.conftest", "-n", "1", "--rootdir", tmp_path, tmp_path]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
    ) as run:  # fmt: skip
        try:
            until((tmp_path / "begun").exists, "the inner test has begun")
        finally:
            run.kill()
    pid, session = (tmp_path / "begun").read_text().split()
    assert session != os.environ[SESSION], "it is not ours that would be killed"
    try:
        until(lambda: int(pid) not in marked(SESSION, session), "its broker is gone")
        until(lambda: not marked(SESSION, session), "so are its worker, and what watches")
    finally:
        kill_marked(SESSION, session)
