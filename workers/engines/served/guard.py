"""A process between a worker and its server: when the worker is gone, however it went, so is that.

Run as `python -P guard.py FD PIDFILE COMMAND...`: starts COMMAND in a process group of its own and
waits. PIDFILE names its process while it runs, for those who look at it, or kill it on purpose.
FD is the reading end of a pipe that only the worker writes to; it closes when the worker dies, by
SIGKILL too. Then, or on SIGTERM, the whole group is asked to end, and killed if it does not.
Without imports of ours: it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PATIENCE_S = 10.0  # between asking and killing


def main(fd: int, pid_file: Path, command: list[str]) -> int:
    """Run `command` until it ends or the worker does; its exit status."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(*_: object) -> None:
        threading.Thread(target=_end_group, args=(server.pid,), daemon=True).start()

    def watch() -> None:
        while os.read(fd, 1):
            pass
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError):  # a full disk; the server is minded all the same
        written = pid_file.with_suffix(".tmp")  # who reads the file finds the whole number
        written.write_text(f"{server.pid}\n", encoding="ascii")
        written.rename(pid_file)
    status = server.wait()
    _signal_group(server.pid, signal.SIGKILL)  # what it left behind
    pid_file.unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


def _end_group(leader: int) -> None:
    _signal_group(leader, signal.SIGTERM)
    threading.Event().wait(PATIENCE_S)
    _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
