"""Keeps a process for each tracker, so that none waits for another.

Each reads the log by itself, and asks its tracker which rows it has: what it lacks is written
whenever it starts. So nothing is queued or noted beside the log, and nothing is lost with it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlstreams.show.metrics.rows import Row, Sink
from rlstreams.up.supervisor.restart import described
from rlstreams.workers.sandbox.descendants import VARIABLE, end_descendants

DEADLINE_S = 120  # of a library: to be imported and ask a server, or to write a batch
CLOSE_S = 30.0  # for all to write what is left, once it is stopped
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # until a tracker that failed is tried again
TRIES = 3  # of a tracker to which a finished log is written
_BATCH, _LOOK_S = 100, 0.05  # rows; between two looks at processes


@contextmanager
def deadline() -> Iterator[None]:
    """End this process by SIGALRM if the block takes longer than `DEADLINE_S`."""
    signal.alarm(DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)


class Timely:
    """A sink of which no call takes longer than the deadline."""

    def __init__(self, made: Callable[[], Sink]) -> None:
        with deadline():
            self._sink = made()

    def write(self, rows: Sequence[Row]) -> None:
        """As `Sink`."""
        for start in range(0, len(rows), _BATCH):
            with deadline():
                self._sink.write(rows[start : start + _BATCH])

    def close(self) -> None:
        """As `Sink`."""
        with deadline():
            self._sink.close()


def keep(
    commands: Mapping[str, Sequence[str]],
    mark: str,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    *,
    tries: float = math.inf,
) -> list[str]:
    """Run the command of each tracker until it ends well, again with pauses where it fails.

    Args:
        commands: by tracker; each hears by its standard input that this process is gone.
        mark: of the run: what an earlier process for it left behind is ended first.
        say: told what fails.
        stopped: from then on the processes end, and have `CLOSE_S` for what they lack.

    Returns:
        The trackers whose process never ended well.
    """
    left = {name: _Writer(name, words, f"track {mark} {name}") for name, words in commands.items()}
    until_s = math.inf
    try:
        while left and time.monotonic() < until_s:
            if until_s == math.inf and stopped():
                until_s = time.monotonic() + CLOSE_S
                for writer in left.values():
                    writer.stop()
            for name, writer in list(left.items()):
                status = writer.tick()
                if status:
                    say(f"{name}: its process {described(status)}; what it lacks waits")
                if status == 0:
                    del left[name]
            if all(writer.num_failures >= tries for writer in left.values()):
                break
            time.sleep(_LOOK_S)
    finally:
        for writer in left.values():
            writer.kill()
    return sorted(left)


class _Writer:
    """The processes of one tracker, one after another."""

    def __init__(self, name: str, words: Sequence[str], mark: str) -> None:
        self._name, self._words, self._mark = name, words, mark
        self._process: subprocess.Popen[bytes] | None = None
        self._due_s = 0.0
        self.num_failures = 0

    def tick(self) -> int | None:
        """Start one when it is time; the status of one that ended now."""
        if self._process is None:
            if time.monotonic() >= self._due_s:
                end_descendants(self._mark)
                self._process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=sys.stderr.fileno(),
                    env={**os.environ, VARIABLE: self._mark},
                    start_new_session=True,
                )
            return None
        if (status := self._process.poll()) is None:
            return None
        self.kill()
        self.num_failures += 1
        self._due_s = time.monotonic() + min(PAUSE_S * self.num_failures, LONGEST_PAUSE_S)
        return status

    def stop(self) -> None:
        """Ask it to end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process, and what its library started; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            end_descendants(self._mark)
            self._process = None
