"""The console command as a person uses it: a process, in a folder of their own."""

from __future__ import annotations

import io
import os
import re
import runpy
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlstreams.__main__ import main as rlstreams
from tests.marked import kill_marked, marked

ROOT = Path(__file__).parents[2]
CONFIG = "infra/examples/demo.toml"
MARK = "RLSTREAMS_TEST_MARK"
UP_S = 600.0  # a short run, on a busy machine
COMMAND_S = 300.0
# A shell's background job ignores Ctrl-C, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
_STEP = re.compile(r"^step +(\d+)/", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Started:
    """A command on its way."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """What it has printed by now."""
        return self.log.read_text("utf-8")

    @property
    def last_step(self) -> int:
        """The step that `up` told of last; 0 before the first."""
        return max((int(number) for number in _STEP.findall(self.output)), default=0)

    def wait_for_step(self, step: int) -> None:
        """Until `up` has told of that step; fails if it ends before or takes too long."""
        deadline_s = time.monotonic() + UP_S
        while self.last_step < step:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output}"
            assert time.monotonic() < deadline_s, f"no step {step} in {UP_S:g} s:\n{self.output}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def ended_within(self, timeout_s: float) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder with `infra/` in it, where `rlstreams` is on the path.

    Every process that a command leaves behind carries `mark` in its environment.
    """

    folder: Path
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    has_files: bool = True  # False: an empty folder, made here

    def __post_init__(self) -> None:
        if self.has_files:
            (self.folder / "infra").symlink_to(ROOT / "infra")
        else:
            self.folder.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """For every command."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ours = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self.mark}
        return {**os.environ, **ours}

    def run(self, *words: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """A command from its start to its end; both outputs in `stdout`."""
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, timeout=timeout_s, check=False,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def here(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command, or a Python script, in this process: torch is imported once for all of them,
        ten seconds of CPU that a process of its own would take."""
        said, before, is_ours = io.StringIO(), sys.argv, words[0] == "rlstreams"
        try:
            with chdir(self.folder), redirect_stdout(said), redirect_stderr(said):
                sys.argv = list(words)
                if is_ours:
                    status = rlstreams(words[1:])
                else:
                    runpy.run_path(words[0], run_name="__main__")
                    status = 0
        finally:
            sys.argv = before
        return subprocess.CompletedProcess(words, status, said.getvalue())

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`rlstreams up` of the demo, to its end."""
        return self.run("rlstreams", "up", CONFIG, *words, timeout_s=UP_S)

    def start_up(self, *words: str, config: str = CONFIG) -> Started:
        """The same, on its way."""
        return self.start("rlstreams", "up", config, *words)

    def start(self, *words: str) -> Started:
        """A command on its way."""
        log = self.folder / f"{words[1]}-{secrets.token_hex(4)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        return Started(process, log)

    def processes(self) -> dict[int, str]:
        """Living processes that commands here have started: process id to program."""
        return marked(MARK, self.mark)

    def close(self) -> None:
        """Kill what is left, so that a failed test leaves nothing behind."""
        kill_marked(MARK, self.mark)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own under a folder; who may not mount one cannot run these tests."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


MAY_MOUNT = sys.platform.startswith("linux") and os.geteuid() == 0
needs_mount = pytest.mark.skipif(not MAY_MOUNT, reason="mounts a small disk: root")
