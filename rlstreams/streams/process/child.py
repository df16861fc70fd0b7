"""A process that we started: its start, its owner, its log, its end, and its cause of death.

A child lives in a session of its own, so Ctrl-C on the terminal does not reach it, and the
processes that it started there can be ended with it. Its standard input is the *owner pipe*:
nothing is ever written, and it closes when the process that started the child is gone, however that
ended.

    LIVES    outlives its owner (a broker); its standard input is empty
    DRAINS   reads the pipe itself (`owner.when_gone`), and ends in good order
    DIES     `reaper.py` stands between, reads the pipe, and ends the child with all that it
             started: in whatever session, with whatever environment, stopped or not

This package lies in `streams`, the lowest floor that starts a process (the broker); `workers` and
the tools use it too. No other module starts one (`tests/test_architecture.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol, Self

from rlstreams.streams.log.text import tail
from rlstreams.streams.process.cause import died, last_error, memory_kills
from rlstreams.streams.process.priority import give_way

TAIL_LINES = 12
GONE_S = 10.0  # longest wait for a killed process: the kernel still frees its memory
BEGIN_S = 30.0  # for a reaper to start its program; it takes 30 ms of CPU
_LOOK_S = 0.01
_REAPER = Path(__file__).with_name("reaper.py")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Orphaned(StrEnum):
    """Action of a child when its owner is gone."""

    LIVES = "lives"
    DRAINS = "drains"
    DIES = "dies"


class Handle(Protocol):
    """A process behind a `Child`: a `subprocess.Popen`, or a process that a fork server made."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """The exit status (negative: a signal), or None while it runs."""


class Child:
    """A started process, alone in its session."""

    def __init__(
        self,
        handle: Handle,
        owner_fd: int = -1,
        *,
        program: int = 0,
        log: Path | None = None,
        log_start: int = 0,
    ) -> None:
        """
        Args:
            owner_fd: our end of its owner pipe; -1: it has none.
            program: the program's process id, where `handle` is its reaper's; else 0.
            log: file that its output is appended to, for its cause of death; None: none.
            log_start: bytes of the log before its start.
        """
        self.started_s = time.monotonic()
        self._memory_kills = memory_kills()
        self.log = log
        self._log_start = log_start
        self._handle = handle
        self._owner_fd = owner_fd
        self._program = program
        self.pid = program or handle.pid
        """Process id of the program: it leads a process group of this number."""

    @classmethod
    def started(
        cls,
        argv: Sequence[str | Path],
        *,
        orphaned: Orphaned,
        log: Path | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environment: Mapping[str, str] = _NOTHING,
        without: Collection[str] = (),
        pass_fds: Sequence[int] = (),
        umask: int = -1,
        gives_way: int = 0,
    ) -> Self:
        """Start a child; return once its program runs.

        Args:
            log: file that its output is appended to, instead of `stdout` and `stderr`, which are
                those of `subprocess.Popen`.
            environment: variables beside ours.
            without: variables of ours that it does not get.
            pass_fds: descriptors that it has under the same numbers.
            umask: of the files that it makes; -1: ours.
            gives_way: its priority, and its session's, see `priority.give_way`; 0: ours.

        Raises:
            OSError: the program is not there, or the system has no room for a process.
        """
        is_held = orphaned is Orphaned.DIES
        with contextlib.ExitStack() as stack:
            stdin, ours, report_in, report_out = subprocess.DEVNULL, -1, -1, -1
            if orphaned is not Orphaned.LIVES:
                stdin, ours = os.pipe()
                stack.callback(os.close, stdin)
            undo = stack.enter_context(contextlib.ExitStack())
            if ours >= 0:
                undo.callback(os.close, ours)
            words = [str(word) for word in argv]
            if is_held:
                report_in, report_out = os.pipe()
                stack.callback(os.close, report_in)
                fds = ",".join(map(str, (report_out, *pass_fds)))
                words = [sys.executable, "-I", "-S", str(_REAPER), fds, *words]
                pass_fds = (report_out, *pass_fds)
            ours_left = {name: text for name, text in os.environ.items() if name not in without}
            log_start = 0
            if log is not None:
                stdout = stderr = stack.enter_context(log.open("ab"))
                log_start = stdout.tell()
            with contextlib.closing(_Fd(report_out)):
                process = subprocess.Popen(
                    words, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds,
                    umask=umask, env={**ours_left, **environment}, start_new_session=True,
                )  # fmt: skip
            program = _begun(process, report_in, words[5:]) if is_held else 0
            undo.pop_all()
        if gives_way:
            give_way(gives_way, program or process.pid)
        return cls(process, ours, program=program, log=log, log_start=log_start)

    @property
    def stdout(self) -> IO[bytes]:
        """Its output, where `stdout` was `subprocess.PIPE`."""
        assert isinstance(self._handle, subprocess.Popen)
        assert self._handle.stdout is not None
        return self._handle.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """Its error output, where `stderr` was `subprocess.PIPE`."""
        assert isinstance(self._handle, subprocess.Popen)
        assert self._handle.stderr is not None
        return self._handle.stderr

    def poll(self) -> int | None:
        """Return the exit status (negative: a signal), or None while it, or its reaper, runs."""
        status = self._handle.poll()
        if status is not None:
            self._let_go()
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the program alone; do nothing if it is gone."""
        self._send(os.kill, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it ended in time."""
        deadline_s = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def kill(self) -> None:
        """End it and all of its session at once, or (`DIES`) every process that it ever started.

        Returns at once: `poll` and `wait` show when it is gone.
        """
        if self._program:
            self._let_go()
        else:
            self._send(os.killpg, signal.SIGKILL)

    def end(self, patience_s: float = 0.0) -> int | None:
        """Ask its session to end, kill the rest after `patience_s`; idempotent.

        Returns:
            Its exit status; None: it outlives SIGKILL by `GONE_S` (a hanging disk or device).
        """
        if patience_s > 0:
            self._send(os.killpg, signal.SIGTERM)
            self.wait(patience_s)
        self.kill()
        self.wait(GONE_S)
        return self.poll()

    def cause(self) -> str:
        """Return its end in words, with the last error in its log; "" while it runs."""
        status = self.poll()
        if status is None:
            return ""
        found = self.last_error()
        return died(status) + (f": {found}" if found else "")

    def ran_out_of_memory(self) -> bool:
        """Whether it ended by SIGKILL, and the kernel has killed a process for memory meanwhile."""
        return self.poll() == -signal.SIGKILL and memory_kills() > self._memory_kills

    def last_error(self) -> str:
        """Return the last error that it wrote; "" if there is none, or no log."""
        return "" if self.log is None else last_error(self.log, self._log_start)

    def log_tail(self, num_lines: int = TAIL_LINES) -> Sequence[str]:
        """Return the last lines of its log; none if it wrote nothing, or has no log."""
        return () if self.log is None else tail(self.log, num_lines)

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        if self._handle.poll() is None:
            # PermissionError: macOS raises it for an ended process that was not waited for.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.pid, number)

    def _let_go(self) -> None:
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
            self._owner_fd = -1


class _Fd:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _begun(reaper: subprocess.Popen[bytes], report: int, argv: Sequence[str]) -> int:
    """Return the program's process id, which its reaper writes to `report`.

    Raises:
        OSError: the program could not be started.
    """
    said, until_s = b"", time.monotonic() + BEGIN_S
    waiting = select.poll()  # `select` takes no descriptor above 1023
    waiting.register(report, select.POLLIN)
    while not said.endswith(b"\n"):
        ready = waiting.poll(1000 * max(0.0, until_s - time.monotonic()))
        more = os.read(report, 64) if ready else b""
        if not more:
            reaper.kill()
            raise OSError(f"{argv[0]}: its reaper ended with status {reaper.wait()}")
        said += more
    pid, number = map(int, said.split())
    if number:
        reaper.wait()
        raise OSError(number, os.strerror(number), argv[0])
    return pid
