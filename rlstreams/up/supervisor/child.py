"""One worker process, the two ways to start it, and why it died as far as log and disk tell.

Children are forked from a server that has imported the heavy libraries once (`forkserver`), on GPUs
too, or are plain Python processes where that does not exist or began to use CUDA. Either way a
child lives in its own session, as the server does, so Ctrl-C on the terminal does not reach it; it
writes to its own log; and it holds one end of a pipe, which closes when its supervisor is gone,
however that ended.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

from rlstreams.streams.log.text import tail

LONGEST = 300  # characters of a cause
FULL_BYTES = 1 << 20  # with less free nothing can be written that is worth it
_READ_BYTES = 1 << 16
# `module.NameError: text`, as Python prints it and as `runtime.explain` does; or the interpreter.
_ERROR = re.compile(r"^(Fatal Python error\b|[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b).*")
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


def last_error(log: Path, start: int = 0) -> str:
    """The last error in a log behind its first `start` bytes; empty if it names none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _READ_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = behind = ""
    for line in reversed(lines):
        if _ERROR.match(line):  # of some the text begins on a line of its own
            found = line + behind if line.endswith(": ") else line
            break
        behind = line.strip() or behind
    return found if len(found) <= LONGEST else f"{found[:LONGEST]}..."


def is_about_room(text: str) -> bool:
    """Whether an error says that a disk or a quota is full."""
    return any(words in text for words in _NO_ROOM)


def is_full(folder: Path) -> bool:
    """Whether the disk under a folder is; False for a folder that is not there."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


PRELOAD = "rlstreams.workers.bootstrap.preload"
LIGHT_ROLES = frozenset({"prompts"})  # import no torch
UNLEARNT = 255  # what multiprocessing gives where the fork server is gone, which alone knew it
_FORK_SERVER = "from multiprocessing.forkserver import main"  # its command line
TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Which worker to start."""

    role: str
    ordinal: int
    config: Path  # resolved configuration, JSON
    log: Path
    instance: str
    reaped: Sequence[str] = ()  # instances of this worker that were seen to end, newest last
    crash_at: str = ""  # see `rlstreams.streams.log.crash_points.arm_from`

    @property
    def worker(self) -> str:
        """`{role}-{ordinal}`."""
        return f"{self.role}-{self.ordinal}"

    def arguments(self, supervisor_fd: int) -> list[str]:
        """The command line of `rlstreams worker`."""
        words = [self.role, str(self.config), "--ordinal", str(self.ordinal)]
        words += ["--instance", self.instance, "--supervisor-fd", str(supervisor_fd)]
        words += ["--reaped", ",".join(self.reaped)] if self.reaped else []
        return [*words, "--crash-at", self.crash_at] if self.crash_at else words


class Child:
    """A started worker."""

    def __init__(
        self, spec: ChildSpec, process: subprocess.Popen[bytes] | _Forked, pipe_fd: int
    ) -> None:
        self.spec = spec
        self.started_s = time.monotonic()
        self.log_start = 0  # bytes of the log before it
        self._process = process
        self._pipe_fd = pipe_fd  # our end: the child drains when it closes

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status (negative: a signal), or None while it runs."""
        status = self._process.poll()
        if status is not None and self._pipe_fd >= 0:
            os.close(self._pipe_fd)
            self._pipe_fd = -1
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a child that is gone needs none."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        deadline_s = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True


class Spawner(Protocol):
    """Starts workers."""

    def spawn(self, spec: ChildSpec) -> Child:
        """Start one; returns at once."""


class ForkSpawner:
    """Forks the roles that compute from a server that has imported torch already.

    Make it early: it imports beside us.
    """

    def __init__(self, context: ForkServerContext, preload: str = PRELOAD) -> None:
        from multiprocessing import forkserver

        self._context = context
        context.set_forkserver_preload([__name__, preload])
        forkserver.ensure_running()

    def spawn(self, spec: ChildSpec) -> Child:
        """See `Spawner`."""
        if spec.role in LIGHT_ROLES:  # it would carry, and wait for, imports that it never uses
            return PlainSpawner().spawn(spec)
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_forked, args=(spec, theirs), name=spec.worker, daemon=False
        )
        process.start()
        theirs.close()
        pipe_fd = os.dup(ours.fileno())
        ours.close()
        return Child(spec, _Forked(process), pipe_fd)


def _command(spec: ChildSpec, pipe_fd: int) -> list[str]:
    return [sys.executable, "-m", "rlstreams", "worker", *spec.arguments(pipe_fd)]


class PlainSpawner:
    """Starts `python -m rlstreams worker ...`."""

    def spawn(self, spec: ChildSpec) -> Child:
        """See `Spawner`."""
        theirs_fd, ours_fd = os.pipe()
        command = _command(spec, theirs_fd)
        with spec.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs_fd],
                start_new_session=True,
            )  # fmt: skip
        os.close(theirs_fd)
        return Child(spec, process, ours_fd)


def make_spawner() -> Spawner:
    """Forking where the platform can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return PlainSpawner()
    return ForkSpawner(multiprocessing.get_context("forkserver"))


def log_tail(log: Path, num_lines: int = TAIL_LINES) -> Sequence[str]:
    """The last lines of a worker's log; empty if it wrote nothing."""
    return tail(log, num_lines)


class _Forked:
    """A multiprocessing process, asked as one of `subprocess` is."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        status = self._process.exitcode
        if status == UNLEARNT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 0)
                return None  # it lives on without the fork server
        return status


def _forked(spec: ChildSpec, pipe: multiprocessing.connection.Connection) -> None:
    """Runs in the child: make it look like a plain process, then be the worker."""
    os.setsid()
    log_fd = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for fd, target_fd in ((null_fd, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, target_fd)
    if getattr(sys.modules.get(PRELOAD), "BEGAN_CUDA", False):
        os.set_inheritable(pipe.fileno(), True)
        os.execv(sys.executable, _command(spec, pipe.fileno()))
    from rlstreams.__main__ import main
    from rlstreams.workers.loop.runtime import end_within

    status = main(["worker", *spec.arguments(pipe.fileno())])
    end_within(status)
    sys.exit(status)


if any(word.startswith(_FORK_SERVER) for word in sys.orig_argv) and os.getsid(0) != os.getpid():
    # The fork server imports this module first. What the terminal sends to its foreground group
    # must not end it: the exit statuses of its children go through it.
    os.setsid()
