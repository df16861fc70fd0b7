"""A server that this worker started: its process, its log, its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.workers.engines.served.command import StartCommand
from rlstreams.workers.engines.served.guard import Owned, listen, socket_file, take_over

TAIL_LINES = 15
TAIL_BYTES = 1 << 16  # that they are looked for in: the log of days is long
MAX_BACK_OFF_S = 60.0
STEADY_S = 120.0  # up for so long, it is started again without a longer pause than the first
GRACE_S = 90.0  # a server whose worker died waits so long for the next one
_END_S = 8.0  # beyond what its guard takes, within what a drain gives a worker to close
_GUARD = Path(__file__).with_name("guard.py")


def pid_file(log: Path) -> Path:
    """Where the process id of the server that writes `log` stands while it runs."""
    return log.with_suffix(".pid")


def left_server(log: Path) -> Owned | None:
    """The server that writes `log` and whose worker died; whoever has it owns it."""
    return take_over(socket_file(pid_file(log)))


def end_left_servers(logs: Path) -> None:
    """Whose logs are in this folder, and whose workers died."""
    found = [left_server(path.with_suffix(".log")) for path in sorted(logs.glob("*.sock"))]
    left = [one for one in found if one is not None]
    for one in left:
        one.end()
    for one in left:
        one.close(_END_S)


def start_locks(visible: str | None) -> Sequence[Path]:
    """A lock file for each GPU of a server that is started with this `CUDA_VISIBLE_DEVICES`."""
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    names = [gpu.name.removeprefix("nvidia") for gpu in gpus]
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()] if gpus else []
    folder = Path(tempfile.gettempdir())
    return [folder / f"rlstreams-{os.getuid()}-gpu-{name.replace('/', '-')}.lock" for name in names]


class ServerProcess:
    """Starts the server, and starts it again with growing pauses."""

    def __init__(
        self,
        command: StartCommand,
        log: Path,
        locks: Sequence[Path] = (),
        *,
        note: str = "",
        grace_s: float = 0.0,
        left: Owned | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            log: what the server writes goes behind what is in it.
            locks: of its GPUs (`start_locks`), held while it starts.
            note: for a worker that takes it over.
            grace_s: how long it waits for that one, once this worker has died; 0: it ends too.
            left: one that a worker before this one started.
        """
        self._command = command
        self.log = log
        self._note = note
        self._grace_s = grace_s
        self._locks = sorted(locks)  # one order for all processes: none waits in a circle
        self._held: list[int] = []
        self.waits_for = ""  # why a start that is due does not happen yet
        self._owned = left
        self.is_inherited = left is not None  # and was not met since
        self.num_failures = 0  # starts in a row that did not come so far as to hold a version
        self._quick_ends = 0
        self._was_in_service = False
        self._is_killed = False
        self._started_s = time.monotonic()
        self._not_before_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._owned is not None and self._owned.poll() is None

    @property
    def is_serving(self) -> bool:
        """Whether it runs and was not told to end: a dying server may still answer."""
        return self.is_running and not self._is_killed

    @property
    def starting_s(self) -> float:
        """Since its start, while it runs and never held a version; else 0."""
        is_starting = self.is_running and not self._was_in_service
        return time.monotonic() - self._started_s if is_starting else 0.0

    def take_turn(self) -> bool:
        """Whether it may start now: a server sizes its cache by the memory that is free as it
        starts, so two of them on one GPU start one after the other."""
        self.waits_for = ""
        for lock in self._locks[len(self._held) :]:
            try:
                self._held.append(take(lock))
            except OwnedError as err:
                self.waits_for = f"process {err.owner} starts a server on this GPU ({lock})"
                return False
        return True

    def end_turn(self) -> None:
        """Its memory is taken, or it is gone: the next server may start."""
        while self._held:
            os.close(self._held.pop())

    def met(self) -> None:
        """It answers: the next server may start."""
        self.is_inherited = False
        self.end_turn()

    def in_service(self) -> None:
        """It holds a version: whatever ends it now, its start did not fail."""
        self._was_in_service = True

    def start(self) -> None:
        """Start it."""
        self._was_in_service = self._is_killed = False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, its = socket.socketpair()
        listener = listen(socket_file(pid_file(self.log))) if self._grace_s else None
        with its, listener or nullcontext(), self.log.open("ab") as log:
            fds = its.fileno(), -1 if listener is None else listener.fileno()
            words = [*fds, self._grace_s, pid_file(self.log), self._note, *self._command.argv]
            process = subprocess.Popen(
                [sys.executable, "-P", str(_GUARD), *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._command.environment},
                pass_fds=[fd for fd in fds if fd >= 0],
                start_new_session=True,
            )
        self._owned = Owned(ours, process=process)
        self._started_s = time.monotonic()

    def ended(self) -> str:
        """Why it ended, if it just did: noted once, and the next start is put off; else empty."""
        status = None if self._owned is None else self._owned.poll()
        if self._owned is None or status is None:
            return ""
        self.end_turn()
        self._owned.release()
        if not self.is_inherited:
            self.num_failures = 0 if self._was_in_service else self.num_failures + 1
        now_s = time.monotonic()
        ran_s = now_s - self._started_s
        self._quick_ends = 1 if ran_s > STEADY_S else self._quick_ends + 1
        self._not_before_s = now_s + min(MAX_BACK_OFF_S, 2.0 ** (self._quick_ends - 1))
        whose = "the process of the last worker" if self.is_inherited else "the process"
        self._owned, self.is_inherited = None, False
        return f"{whose} ended with status {status} after {ran_s:.0f} s"

    @property
    def may_start(self) -> bool:
        """Whether its pause is over."""
        return self._owned is None and time.monotonic() >= self._not_before_s

    def log_tail(self) -> Sequence[str]:
        """The last lines that it wrote."""
        if not self.log.is_file():
            return ()
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]

    def kill(self) -> None:
        """It hangs: end it at once. `ended` tells the rest."""
        if self._owned is not None:
            self._is_killed = True
            self._owned.end()

    def close(self) -> None:
        """End it and what it started; idempotent."""
        self.end_turn()
        if self._owned is not None:
            self._owned.close(_END_S)
            self._owned = None
