"""A server that this worker started: its process, its log, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.workers.engines.served.command import StartCommand

TAIL_LINES = 15
TAIL_BYTES = 1 << 16  # that they are looked for in: the log of days is long
MAX_BACK_OFF_S = 60.0
STEADY_S = 120.0  # up for so long, it is started again without a longer pause than the first
_END_S = 15.0
_GUARD = Path(__file__).with_name("guard.py")


def pid_file(log: Path) -> Path:
    """Where the process id of the server that writes `log` stands while it runs."""
    return log.with_suffix(".pid")


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

    def __init__(self, command: StartCommand, log: Path, locks: Sequence[Path] = ()) -> None:
        """Nothing is started yet.

        Args:
            log: what the server writes goes behind what is in it.
            locks: of its GPUs (`start_locks`), held while it starts.
        """
        self._command = command
        self.log = log
        self._locks = sorted(locks)  # one order for all processes: none waits in a circle
        self._held: list[int] = []
        self.waits_for = ""  # why a start that is due does not happen yet
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self.num_failures = 0  # starts in a row that did not come so far as to hold a version
        self._quick_ends = 0
        self._was_in_service = False
        self._is_killed = False
        self._started_s = 0.0
        self._not_before_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

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

    def in_service(self) -> None:
        """It holds a version: whatever ends it now, its start did not fail."""
        self._was_in_service = True

    def start(self) -> None:
        """Start it."""
        self._close_pipe()
        self._was_in_service = self._is_killed = False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        guard = [sys.executable, "-P", str(_GUARD), str(reading), str(pid_file(self.log))]
        guarded = [*guard, *self._command.argv]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._command.environment},
                pass_fds=[reading],
                start_new_session=True,
            )
        os.close(reading)
        self._pipe = writing
        self._started_s = time.monotonic()

    def ended(self) -> str:
        """Why it ended, if it just did: noted once, and the next start is put off; else empty."""
        if self._process is None or self._process.poll() is None:
            return ""
        self.end_turn()
        status = self._process.returncode
        self.num_failures = 0 if self._was_in_service else self.num_failures + 1
        now_s = time.monotonic()
        ran_s = now_s - self._started_s
        self._quick_ends = 1 if ran_s > STEADY_S else self._quick_ends + 1
        self._not_before_s = now_s + min(MAX_BACK_OFF_S, 2.0 ** (self._quick_ends - 1))
        self._process = None
        return f"the process ended with status {status} after {ran_s:.0f} s"

    @property
    def may_start(self) -> bool:
        """Whether its pause is over."""
        return self._process is None and time.monotonic() >= self._not_before_s

    def log_tail(self) -> Sequence[str]:
        """The last lines that it wrote."""
        if not self.log.is_file():
            return ()
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]

    def kill(self) -> None:
        """It hangs: end it at once. `ended` tells the rest."""
        if self._process is not None:
            self._is_killed = True
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it and what it started; idempotent."""
        self.end_turn()
        self._close_pipe()
        if self._process is None:
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
