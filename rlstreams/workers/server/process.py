"""The process of a model server: its start, its health, its end. Ends with its owner."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.streams.process.bytecode import variables
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.priority import COMPUTES
from rlstreams.streams.synced import write_whole
from rlstreams.workers.engines.served.command import StartCommand

PATIENCE_S = 5.0  # between asking a server to end and killing it
REFUSED = -1  # a status: nobody listens at the address
READY = 200


def pid_file(log: Path) -> Path:
    """File with the process id of the server that writes `log`, while it runs."""
    return log.with_suffix(".pid")


def start_locks(visible: str | None) -> Sequence[Path]:
    """A lock file for each GPU of a server that is started with this `CUDA_VISIBLE_DEVICES`.

    A server sizes its cache by the memory that is free as it starts: a process that starts
    one on a GPU holds the lock until it answers.
    """
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    names = [gpu.name.removeprefix("nvidia") for gpu in gpus]
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()] if gpus else []
    folder = Path(tempfile.gettempdir())
    return [folder / f"rlstreams-{os.getuid()}-gpu-{name.replace('/', '-')}.lock" for name in names]


class MemoryLock:
    """A lock that shows that a server may have memory on a device that roles share.

    The server has its descriptor too, so it is held until the last of both has ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fd = -1

    def hold(self) -> str:
        """Take the lock, if need be; return the id of another process that has it, or ""."""
        if self.fd < 0:
            try:
                self.fd = take(self._path)
            except OwnedError as err:
                return err.owner
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ""

    def release(self) -> None:
        """Release the lock: the memory is given up, or the server has ended."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)


class ServerProcess:
    """One life of a server.

    Args:
        log: its output is appended there.
        locks: of its GPUs (`start_locks`), held while it starts.
        memory: held while it may have memory; None: it has its device alone.
    """

    def __init__(
        self,
        command: StartCommand,
        log: Path,
        locks: Sequence[Path] = (),
        memory: MemoryLock | None = None,
    ) -> None:
        self._command = command
        self.log = log
        self._locks = sorted(locks)  # one order for all processes: none waits in a circle
        self._held: list[int] = []
        self._memory = memory
        self.child: Child | None = None

    def why_not_yet(self) -> str:
        """Why it may not start yet; empty: it may, and has taken its locks."""
        if self._memory is not None and (owner := self._memory.hold()):
            return f"process {owner} has its memory on the device still"
        for lock in self._locks[len(self._held) :]:
            try:
                self._held.append(take(lock))
            except OwnedError as err:
                return f"process {err.owner} starts a server on this GPU ({lock})"
        return ""

    def start(self) -> None:
        """Start it; raises OSError, if its program is not there."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(self._command.environment)
        self.child = Child.started(
            self._command.argv,
            orphaned=Orphaned.DIES,
            log=self.log,
            environment=environment | variables(self._command.library, os.environ | environment),
            pass_fds=() if self._memory is None else (self._memory.fd,),
            gives_way=COMPUTES,
        )
        with contextlib.suppress(OSError):  # a full disk; the server is minded all the same
            write_whole(pid_file(self.log), f"{self.child.pid}\n".encode())

    def answered(self) -> None:
        """Note that its memory is taken: the next server may start on its GPU."""
        while self._held:
            os.close(self._held.pop())

    def sleeps(self) -> None:
        """Note that it has given its memory up."""
        if self._memory is not None:
            self._memory.release()

    def end(self, patience_s: float = 0.0) -> None:
        """End it and all that it started; idempotent."""
        if self.child is not None:
            self.child.end(patience_s)
            pid_file(self.log).unlink(missing_ok=True)
            self.child = None
        self.answered()
        if self._memory is not None:
            self._memory.release()


class HealthLooks:
    """Looks at `/health` of a server, in a thread: a look may hang.

    Args:
        alive: statuses of a server that works.
    """

    def __init__(self, url: str, alive: Collection[int], every_s: float, longest_s: float) -> None:
        self._url, self._alive = url, alive
        self._every_s, self._longest_s = every_s, longest_s
        self._stop = threading.Event()
        self.is_ready = False  # it has answered `READY` since `begin`
        self.answered_s = 0.0  # when it last answered as one that works; monotonic
        self._thread = threading.Thread(target=self._run, name="server-health", daemon=True)

    def begin(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            status = status_of(self._url, self._longest_s)
            if status == READY:
                self.is_ready = True
            if status in self._alive:
                self.answered_s = time.monotonic()
            self._stop.wait(self._every_s)


def status_of(url: str, timeout_s: float) -> int:
    """The status that `/health` is answered with; 0: no answer; or `REFUSED`."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port or 80, timeout=timeout_s
    )
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except ConnectionRefusedError:
        return REFUSED
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
