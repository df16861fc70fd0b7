"""Keeps a process for each tracker, so that none waits for another.

Each reads the log by itself, and asks its tracker which rows it has: what it lacks is written
whenever it starts. So nothing is queued or noted beside the log, and nothing is lost with it.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlstreams.show.metrics.rows import MetricsRow, Sink
from rlstreams.streams.process.cause import died
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.keeper import Ended, Keeper, Limits

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

    def write(self, rows: Sequence[MetricsRow]) -> None:
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
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    *,
    tries: float = math.inf,
) -> list[str]:
    """Run the command of each tracker until it ends well, again with pauses where it fails.

    Args:
        commands: by tracker; their processes end with this one.
        say: called with each failure.
        stopped: from then on the processes end, and have `CLOSE_S` for what they lack.

    Returns:
        The trackers whose process never ended well.
    """
    left = {name: _Writer(words, tries) for name, words in commands.items()}
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
                    say(f"{name}: its process {died(status)}; what it lacks waits")
                if status == 0:
                    del left[name]
            if all(writer.is_given_up for writer in left.values()):
                break
            time.sleep(_LOOK_S)
    finally:
        for writer in left.values():
            writer.kill()
    return sorted(left)


class _Writer:
    """The processes of one tracker, one after another."""

    def __init__(self, words: Sequence[str], tries: float) -> None:
        self._words = words
        limits = Limits(failures=tries, first_s=PAUSE_S, longest_s=LONGEST_PAUSE_S)
        self._keeper = Keeper(limits)
        self._child: Child | None = None
        self._due_s = 0.0
        self.is_given_up = False  # it is tried on, though, while others have tries left

    def tick(self) -> int | None:
        """Start a process when it is time; return the status of one that ended now, else None."""
        if self._child is None:
            if time.monotonic() >= self._due_s:
                # Libraries start processes of their own, in sessions of their own.
                self._child = Child.started(
                    self._words, orphaned=Orphaned.DIES, stdout=sys.stderr.fileno()
                )
            return None
        if (status := self._child.poll()) is None:
            return None
        self._child, now_s = None, time.monotonic()
        verdict = self._keeper.ended(Ended.FAILED, now_s)
        self.is_given_up = verdict.is_over
        self._due_s = now_s + verdict.delay_s
        return status

    def stop(self) -> None:
        """Ask it to end."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process, and what its library started; idempotent."""
        if self._child is not None:
            self._child.end()
            self._child = None
