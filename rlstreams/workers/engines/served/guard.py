"""A process between a worker and its server: it ends the server, and outlives a worker that died.

Run as `python -P guard.py OWNER LISTENER GRACE_S PIDFILE NOTE COMMAND...`: starts COMMAND in a
process group of its own and waits. PIDFILE names its process while it runs, for those who look at
it, or kill it on purpose.

Who holds the other end of the socket OWNER owns the server. An owner that says END, or SIGTERM,
ends the group: it is asked to, and killed if it does not. An owner that leaves without END died,
by SIGKILL perhaps: who connects to the socket LISTENER within GRACE_S is the next one, and is told
NOTE; else the group is ended. A worker that is only stopped still holds its end, so there is never
a second owner. Without imports of ours: it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 5.0  # between asking and killing
END, OWNED = b"end", b"owned\n"
_LONGEST = 4096  # of a NOTE
_PATH_BYTES = 100  # of a socket's address; the kernel has room for a few more


class Guard:
    """One server, and who owns it."""

    def __init__(self, owner: int, listener: int, grace_s: float, pid_file: Path) -> None:
        self._owner: socket.socket | None = socket.socket(fileno=owner)
        self._listener = None if listener < 0 else socket.socket(fileno=listener)
        self._grace_s = grace_s
        self._pid_file = pid_file

    def run(self, note: str, command: list[str]) -> int:
        """Run `command` until it ends, or nobody owns it any more; its exit status."""
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

        def end(*_: object) -> None:
            threading.Thread(target=_end_group, args=(server.pid,), daemon=True).start()

        def watch() -> None:
            self._until_abandoned(f"{note}\n".encode(), server.pid)
            end()

        signal.signal(signal.SIGTERM, end)
        with contextlib.suppress(OSError):  # a full disk; the server is minded all the same
            written = self._pid_file.with_suffix(".tmp")  # a reader finds the whole number
            written.write_text(f"{server.pid}\n", encoding="ascii")
            written.rename(self._pid_file)
        threading.Thread(target=watch, daemon=True).start()
        status = server.wait()
        _signal_group(server.pid, signal.SIGKILL)  # what it left behind
        status = status if status >= 0 else 128 - status
        if self._is_newest(server.pid):
            self._pid_file.unlink(missing_ok=True)
            socket_file(self._pid_file).unlink(missing_ok=True)
        if self._owner is not None:
            with contextlib.suppress(OSError):
                self._owner.send(f"{status}\n".encode())
        return status

    def _until_abandoned(self, note: bytes, server: int) -> None:
        until_s = math.inf
        while True:
            asked = [one for one in (self._owner, self._listener) if one is not None]
            left_s = None if self._owner else max(0.0, until_s - time.monotonic())
            ready, _, _ = select.select(asked, [], [], left_s)
            if not ready:
                return
            if self._owner in ready:  # first: who connects after a death meets no owner
                if _received(self._owner):
                    return
                self._owner, until_s = None, time.monotonic() + self._grace_s
                if self._listener is None or not self._is_newest(server):
                    return
            elif self._listener is not None:
                other, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    other.send(OWNED if self._owner else note)
                if self._owner is None:
                    self._owner = other
                else:
                    other.close()

    def _is_newest(self, server: int) -> bool:
        """Whether the files are of this server: the successor of a worker that was stopped starts
        another one, with files of the same names."""
        try:
            return int(self._pid_file.read_text(encoding="ascii")) == server
        except (OSError, ValueError):
            return False


class Owned:
    """A worker's end: while it is open, the server is this worker's."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        process: subprocess.Popen[bytes] | None = None,
        told: str = "",
    ) -> None:
        """Args: process: the guard, of who started it. told: by the guard, of who took it over."""
        self.note, _, status = told.partition("\n")
        self._connection = connection
        self._process = process
        self._status = int(status) if status else None

    def poll(self) -> int | None:
        """The server's exit status; None while it runs."""
        if self._process is not None:
            return self._process.poll()
        if self._status is None:
            try:
                said = self._connection.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                said = b""
            self._status = int(said or 128 + signal.SIGKILL)  # silent: the guard was killed
        return self._status

    def end(self) -> None:
        """Have the server ended; `poll` tells when it has."""
        with contextlib.suppress(OSError):
            self._connection.send(END)

    def close(self, limit_s: float) -> None:
        """Have it ended and wait for that; what is left after `limit_s` loses its guard."""
        self.end()
        until_s = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(0.01)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.release()

    def release(self) -> None:
        """Let go, as death does."""
        self._connection.close()


def socket_file(pid_file: Path) -> Path:
    """Where the guard of the server of `pid_file` listens."""
    return pid_file.with_suffix(".sock")


def listen(path: Path) -> socket.socket | None:
    """For a guard to be passed; who listened there before is found no more. None: a file system
    without sockets, where a server ends with its worker."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        with _address(path) as address:
            listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener


def take_over(path: Path) -> Owned | None:
    """The server whose guard listens there; None: no guard, or its worker lives.

    The end of a server that is about to end is waited for.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(2 * PATIENCE_S)
    try:
        with _address(path) as address:
            connection.connect(address)
        said = connection.recv(_LONGEST)
    except OSError:
        said = b""
    if said in (b"", OWNED):
        connection.close()
        return None
    connection.settimeout(None)
    return Owned(connection, told=said.decode())


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """A name that a socket's address has room for."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _received(owner: socket.socket) -> bytes:
    with contextlib.suppress(OSError):  # it died without having read what it was told
        return owner.recv(len(END))
    return b""


def _end_group(leader: int) -> None:
    _signal_group(leader, signal.SIGTERM)
    threading.Event().wait(PATIENCE_S)
    _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


if __name__ == "__main__":
    _owner, _listener, _grace_s, _pid_file, _note = sys.argv[1:6]
    guard = Guard(int(_owner), int(_listener), float(_grace_s), Path(_pid_file))
    sys.exit(guard.run(_note, sys.argv[6:]))
