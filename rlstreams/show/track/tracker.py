"""What gives rows to trackers: a thread and a process for each, so that none waits for another.

A tracker itself says which rows it has, whenever its process starts; what it lacks is written. So
nothing is noted beside it, and a kill between a write and a note cannot be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any

from rlstreams.show.metrics.rows import Row
from rlstreams.show.track.sinks import About
from rlstreams.workers.sandbox.descendants import VARIABLE, end_descendants

DEADLINE_S = 120.0  # of an answer: to import a library and ask a server, or to write a batch
CLOSE_S = 15.0  # without a row taken, once it is stopped
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # until a tracker that failed is tried again
_BATCH, _LOOK_S = 100, 0.05  # rows; between two looks at sinks that end


class SinkError(Exception):
    """A tracker refused, hung or ended; says how."""


class Tracker:
    """Gives rows to every sink; a `Sink` of `read_rows`.

    Args:
        settings: of each tracker, by name.
        say: told what fails, from any thread.
        deadline_s: of an answer; then a sink's process is killed, and started again.
    """

    def __init__(
        self,
        settings: Mapping[str, Mapping[str, str]],
        about: About,
        say: Callable[[str], None],
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._rows: dict[str, Row] = {}  # the queue; a log that is read again adds nothing
        self._news = threading.Condition()
        self._closing = False
        self._given_up = threading.Event()
        self.say, self.about, self.deadline_s = say, about, deadline_s
        self._threads = [_Sink(self, name, dict(given)) for name, given in settings.items()]
        for thread in self._threads:
            thread.start()

    def write(self, rows: Sequence[Row]) -> None:
        """Queue rows; never waits."""
        with self._news:
            for row in rows:
                self._rows.setdefault(row.key, row)
            self._news.notify_all()

    def rows(self, after: int) -> Sequence[Row]:
        """The next batch behind the first `after` rows, waited for; empty: there will be none."""
        with self._news:
            self._news.wait_for(lambda: len(self._rows) > after or self._closing)
            return list(self._rows.values())[after : after + _BATCH]

    def pause(self, seconds: float) -> bool:
        """Wait before a sink is tried again; False: do not."""
        return not self._given_up.wait(seconds)

    def close(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Let every sink write what it lacks, and end it; `missing` says what did not go.

        Args:
            stopped: who is stopped gives up sinks that take nothing for `CLOSE_S`; others wait
                for two deadlines.
        """
        with self._news:
            self._closing = True
            self._news.notify_all()
        taken, since_s = self.taken, time.monotonic()
        while any(thread.is_alive() for thread in self._threads):
            if self.taken != taken:
                taken, since_s = self.taken, time.monotonic()
            if time.monotonic() - since_s > (CLOSE_S if stopped() else 2 * self.deadline_s):
                break
            time.sleep(_LOOK_S)
        self._given_up.set()
        for thread in self._threads:
            thread.kill()
            thread.join()

    @property
    def taken(self) -> Mapping[str, int]:
        """By sink: how many of the rows it has."""
        return {thread.sink: thread.num_taken for thread in self._threads}

    @property
    def missing(self) -> Mapping[str, int]:
        """Rows by sink that it lacks; those that have all, and said so, are left out."""
        return {t.sink: len(self._rows) - t.num_taken for t in self._threads if not t.is_done}


class _Sink(threading.Thread):
    """One tracker: a process is started, fed, and started again when it fails."""

    def __init__(self, tracker: Tracker, sink: str, settings: Mapping[str, str]) -> None:
        super().__init__(name=f"sink {sink}", daemon=True)
        self.sink, self.num_taken, self.is_done = sink, 0, False
        self._tracker, self._settings = tracker, settings
        self._mark = f"track {tracker.about.identity} {sink}"
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Any = None

    def run(self) -> None:
        """Until all rows are there, or the tracker is closed."""
        pause_s, go_on = PAUSE_S, True
        while go_on and not self.is_done:
            before = self.num_taken
            try:
                self._deliver()
            except (SinkError, OSError) as err:
                pause_s = PAUSE_S if self.num_taken > before else pause_s
                text = " ".join(str(err).split())[:300]
                self._tracker.say(f"{self.sink}: {text}; the run goes on, and what it lacks waits")
            finally:
                self.kill()
            if not self.is_done:
                go_on = self._tracker.pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _deliver(self) -> None:
        self._start()
        self._ask("open", self.sink, self._settings, self._tracker.about)
        self.num_taken = 0
        while rows := self._tracker.rows(self.num_taken):
            self._ask("write", rows)
            self.num_taken += len(rows)
        self._ask("close")
        self.is_done = True

    def _start(self) -> None:
        end_descendants(self._mark)  # of a tracker that was killed
        self._link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlstreams.show.track.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env={**os.environ, VARIABLE: self._mark},
                start_new_session=True,
            )

    def _ask(self, *question: object) -> None:
        """Have the process do it.

        Raises:
            SinkError: it refused, ended, or did not answer in time.
        """
        if not self._tracker.pause(0):
            raise SinkError("it was given up")
        try:
            self._link.send(question)
            if not self._link.poll(limit_s := self._tracker.deadline_s):
                raise SinkError(f"no answer to {question[0]!r} within {limit_s:g} s")
            problem = self._link.recv()
        except (EOFError, OSError) as err:
            raise SinkError(f"its process ended at {question[0]!r}") from err
        if problem:
            raise SinkError(problem)

    def kill(self) -> None:
        """End the process, and what its library started; idempotent."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            end_descendants(self._mark)
