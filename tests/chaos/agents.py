"""A run of agents in all four forms, and the processes of theirs that a fault can hit.

Two of the forms run below rollout workers: a command for each session, a process for many. Runners
and clients from outside are processes of their own. A killed runner is started again, as whoever
operates it would; clients live on, for each has a key that outlives the worker.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.marked import marked

PROGRAM = Path(__file__).with_name("agent_program.py")
MARK = "RLSTREAMS_KILLS_MARK"
FORMS = ("own", "inside", "away")  # those that are killed, in turn
IN_PROCESS = "sandbox/program.py"  # what the process of a function runs
CONFIG = """
extends = "{demo}"

[run]
id = "agents"
dir = "{run}"

[[agent]]
name = "own"
command = ["python", "{program}", "own", "{notes}"]

[[agent]]
name = "inside"
python = "{program}:solve"
options = {{ notes = "{notes}" }}
processes = 1
starts = 20

[[agent]]
name = "away"
remote = true
lease_s = 3.0
starts = 20

[[agent]]
name = "guest"
outside = true
lease_s = 20.0

[reward]
verifier = "agent"

[rollout]
workers = {workers}
slots = 8

[prompts]
group_size = 4
evaluate_every = 0
evaluate_rows = 1

[demo]
kills = []

[trainer]
steps = {steps}
groups_per_step = 2
min_group_samples = 2
checkpoint_every = 4

[deadlines]
stall_s = 120.0
"""


class AgentProcesses:
    """Those of one run; all of them carry a mark in their environment."""

    def __init__(self, run: Path, notes: Path, workers: int, seed: int) -> None:
        self._run, self._notes, self._workers, self._seed = run, notes, workers, seed
        self._mark = os.environ[MARK] = secrets.token_hex(8)
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.killed = Counter[str]()  # by form

    def start(self, form: str) -> None:
        """Start runners, or clients from outside, of all workers."""
        words = [sys.executable, PROGRAM, form, self._run, self._notes, str(self._workers)]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        self._started[form] = subprocess.Popen(words, env=environment)

    def kill(self, number: int) -> bool:
        """SIGKILL to a process of the form whose turn it is; whether there was one."""
        form = FORMS[self.killed.total() % len(FORMS)]
        if form == "away":
            self._started[form].kill()
            self._started[form].wait()
            self.start(form)
        else:
            found = sorted(self._below(form))
            if not found:
                return False
            try:
                os.kill(random.Random(f"{self._seed}.{number}").choice(found), signal.SIGKILL)
            except ProcessLookupError:
                return False
        self.killed[form] += 1
        return True

    def _below(self, form: str) -> Iterator[int]:
        """Process ids of a form's agents below rollout workers."""
        for pid in marked(MARK, self._mark):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except (OSError, ValueError):
                continue
            is_own = line[1:3] == [str(PROGRAM), "own"]
            is_inside = len(line) > 2 and line[2].endswith(IN_PROCESS)
            if is_own if form == "own" else is_inside:
                yield pid

    def close(self) -> None:
        """End those that we started; the others end with their worker."""
        for process in self._started.values():
            process.kill()
            process.wait()


@contextmanager
def agents_of(run: Path, notes: Path, workers: int, seed: int) -> Iterator[AgentProcesses]:
    """Runners and clients, from before the run on; they wait for its files."""
    found = AgentProcesses(run, notes, workers, seed)
    try:
        found.start("away")
        found.start("guest")
        yield found
    finally:
        found.close()
