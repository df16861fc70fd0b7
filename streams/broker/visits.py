"""Several who look at a run's log at once share its broker: the last one stops it.

A broker that was started for a look alone is marked as such, with its process id. Whoever looks
holds a shared `flock` on `visits.lock`; starting, and stopping at the end, are done one at a time
under an exclusive one on `turn.lock`. Locks go with their processes, however these end.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rlstreams.streams.log.errors import ConfigError, DeadlineError

TURN_S = 180.0  # longer than a start, a fencing and a stop together


class State(Protocol):
    """What is needed of `BrokerState`."""

    @property
    def pid(self) -> int:
        """Of the broker's process."""

    @property
    def bootstrap(self) -> str:
        """`host:port`."""


class Broker(Protocol):
    """What is needed of `EmbeddedBroker`."""

    folder: Path

    def status(self) -> State | None:
        """The living broker, or None."""

    def attach_or_start(self) -> State:
        """The living broker once it serves, else a new one."""

    def stop(self) -> bool:
        """Stop it."""


@contextmanager
def visited(broker: Broker) -> Iterator[str]:
    """`host:port` of a broker; one that does not run is started, and stopped by the last visitor.

    Raises:
        ConfigError: it does not run, and its folder is somebody else's.
        DeadlineError: another one starts or stops it for too long.
    """
    if broker.folder.exists() and not os.access(broker.folder, os.W_OK):
        yield _bootstrap_of_another(broker)
        return
    visits, fd = _Visits(broker.folder), -1
    try:
        with visits.turn():
            before = broker.status()
            state = broker.attach_or_start()
            if before is None or before.pid != state.pid:
                visits.mark(state.pid)
            fd = visits.enter()
        yield state.bootstrap
    finally:
        if fd >= 0:
            with visits.turn():
                os.close(fd)
                _stop_unvisited(broker, visits)


@contextmanager
def owned(broker: Broker) -> Iterator[State]:
    """As its owner, who stops the broker at the end, but not under the eyes of a visitor."""
    visits = _Visits(broker.folder)
    with visits.turn():
        state = broker.attach_or_start()
        visits.unmark()
        fd = visits.enter()
    try:
        yield state
    finally:
        with visits.turn():
            os.close(fd)
            if (last := broker.status()) is not None:  # its keeper may have started another
                try:
                    visits.mark(last.pid)
                    _stop_unvisited(broker, visits)
                except OSError:  # a full disk: it is stopped without a mark, whoever looks
                    broker.stop()


def _bootstrap_of_another(broker: Broker) -> str:
    state = broker.status()
    if state is None:
        raise ConfigError(
            f"the broker of {broker.folder} does not run, and the folder cannot be written by you: "
            "let its owner start it (rlstreams broker start), or make a recording"
        )
    return state.bootstrap


def _stop_unvisited(broker: Broker, visits: _Visits) -> None:
    state = broker.status()
    if state is not None and visits.is_marked(state.pid) and visits.is_empty():
        broker.stop()


class _Visits:
    """The two locks and the mark of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._mark = folder / "visits.pid"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else starts or stops the broker meanwhile."""
        fd = self._open("turn.lock")
        try:
            until_s = time.monotonic() + TURN_S
            while not _try(fd, fcntl.LOCK_EX):
                if time.monotonic() > until_s:
                    raise DeadlineError(
                        f"another process has been starting or stopping the broker in "
                        f"{self._folder} for {TURN_S:g} s"
                    )
                time.sleep(0.05)
            yield
        finally:
            os.close(fd)

    def enter(self) -> int:
        """A descriptor that is to be closed when the visit is over."""
        fd = self._open("visits.lock")
        fcntl.flock(fd, fcntl.LOCK_SH)  # exclusive only in somebody's turn, and this is ours
        return fd

    def is_empty(self) -> bool:
        """Whether nobody looks; only in a turn."""
        fd = self._open("visits.lock")
        try:
            return _try(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)

    def mark(self, pid: int) -> None:
        """This broker is to be stopped by the last visitor."""
        self._mark.write_text(f"{pid}\n", encoding="ascii")

    def unmark(self) -> None:
        """It is not."""
        self._mark.unlink(missing_ok=True)

    def is_marked(self, pid: int) -> bool:
        """Whether it is."""
        try:
            return self._mark.read_text(encoding="ascii") == f"{pid}\n"
        except FileNotFoundError:
            return False

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o644)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
