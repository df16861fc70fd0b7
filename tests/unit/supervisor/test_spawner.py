"""A forked role begins as `python -m rlstreams` does, without a word of its own."""

from __future__ import annotations

import subprocess
import sys

# As in a fork server that the console script started: it has imported `rlstreams.__main__`.
FORKED = """
import sys
import rlstreams.__main__
from rlstreams.up.supervisor.spawner import _work
raise SystemExit(_work([sys.executable, "-m", "rlstreams", "worker", "--help"]))
"""


def test_a_forked_role_writes_no_warning_into_its_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "Usage: rlstreams worker" in done.stdout
