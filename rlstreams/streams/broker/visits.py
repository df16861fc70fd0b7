"""Visits to a run's log: visitors at the same time share its broker, and the last one stops it.

A broker that was started for a visit alone is marked as such, with its process id. A visitor holds
a shared `flock` on `visits.lock`; starts and stops are done one at a time under `turn.lock`. Locks
go with their processes, however these end.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.streams.log.errors import BrokerError, DeadlineError
from rlstreams.streams.log.owner_lock import OwnedError, held

if TYPE_CHECKING:
    from rlstreams.streams.broker.embedded import BrokerState, EmbeddedBroker

ALONE_S = 180.0  # longer than a start, a fencing and a stop together


@contextmanager
def visited(broker: EmbeddedBroker) -> Iterator[str]:
    """Yield `host:port` of a broker; start one that is down, and stop that after the last visit.

    Raises:
        DeadlineError: another process has been starting or stopping it for too long.
    """
    folder, fd = broker.folder, -1
    try:
        with _alone(folder):
            before = broker.status()
            state = broker.attach_or_start()
            if before is None or before.pid != state.pid:
                _mark(folder, state.pid)
            fd = _enter(folder)
        yield state.bootstrap
    finally:
        if fd >= 0:
            with _alone(folder):
                os.close(fd)
                _stop_unvisited(broker)


@contextmanager
def owned(broker: EmbeddedBroker) -> Iterator[BrokerState]:
    """Yield the broker as its owner, who stops it at the end, unless a visitor still uses it."""
    folder = broker.folder
    with _alone(folder):
        state = broker.attach_or_start()
        _mark_file(folder).unlink(missing_ok=True)
        fd = _enter(folder)
    try:
        yield state
    finally:
        with _alone(folder):
            os.close(fd)
            if (last := broker.status()) is not None:  # its keeper may have started another
                try:
                    _mark(folder, last.pid)
                    _stop_unvisited(broker)
                except OSError:  # a full disk: stop it without a mark, and despite visitors
                    broker.stop()


def _stop_unvisited(broker: EmbeddedBroker) -> None:
    """Stop a broker that was started for a visit and has no visitor; only under `_alone`."""
    state, mark = broker.status(), _mark_file(broker.folder)
    if state is None or not mark.is_file() or mark.read_text("ascii") != f"{state.pid}\n":
        return
    fd = _open(broker.folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(fd)
    broker.stop()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from starting or stopping the broker meanwhile.

    Raises:
        BrokerError: its folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(folder / "turn.lock", wait_s=ALONE_S))
        except OwnedError:
            raise DeadlineError(
                f"another process has been starting or stopping the broker in {folder} for "
                f"{ALONE_S:g} s"
            ) from None
        except OSError as err:
            if err.errno not in (errno.EROFS, errno.EACCES):
                raise
            raise BrokerError(
                f"a broker writes where its log is, and {folder} cannot be written "
                f"({err.strerror}): copy the run's folder to where you may write, or look at a "
                "recording of the run (`rlstreams record run`)"
            ) from err
        yield


def _enter(folder: Path) -> int:
    """Return a descriptor to be closed when the visit is over; only under `_alone`."""
    fd = _open(folder)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _open(folder: Path) -> int:
    return os.open(folder / "visits.lock", os.O_RDWR | os.O_CREAT, 0o644)


def _mark_file(folder: Path) -> Path:
    return folder / "visits.pid"


def _mark(folder: Path, pid: int) -> None:
    """Mark this broker as one that the last visitor stops."""
    _mark_file(folder).write_text(f"{pid}\n", encoding="ascii")
