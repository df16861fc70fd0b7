"""Which processes of a machine are a run's agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.agents import MARK, PROGRAM, AgentProcesses

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)
END_S = 60.0


@contextmanager
def waiting(pipe: Path, mark: str, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a pipe which nobody writes to."""
    environment = {**os.environ, MARK: mark, "RLSTREAMS_TASK": str(pipe)}
    process = subprocess.Popen([sys.executable, *words], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_S)


def test_only_agents_of_this_run_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn a command and the process of a function; neither another run's nor another program
    of this one, though both are the same program."""
    monkeypatch.setenv(MARK, "")
    pipe, inside = tmp_path / "pipe", tmp_path / "sandbox/program.py"
    os.mkfifo(pipe)
    inside.parent.mkdir()
    inside.write_text(f"open({str(pipe)!r})")
    agents = AgentProcesses(tmp_path, tmp_path / "notes", 1, 0)
    mark = os.environ[MARK]
    assert not agents.kill(0)
    with (
        waiting(pipe, mark, PROGRAM, "own", "notes") as command,
        waiting(pipe, mark, "-P", inside, "7") as function,
        waiting(pipe, "another", PROGRAM, "own", "notes") as foreign,
        waiting(pipe, mark, "-c", f"open({str(pipe)!r})") as other,
    ):
        assert agents.kill(0)
        assert -signal.SIGKILL == command.wait(END_S)
        assert agents.kill(1)
        assert -signal.SIGKILL == function.wait(END_S)
        assert (None, None) == (foreign.poll(), other.poll())
    assert {"own": 1, "inside": 1} == dict(agents.killed)
