"""The loop that all roles share: tick, drain, stop; and the meaning of exit statuses.

`run` drives a role, one tick after another. A tick polls, hands work to the compute threads, and
commits finished work; it waits at most a few tens of milliseconds.
`rlstreams.workers.loop.stall` decides when a stuck role ends itself.
The thread that calls `run` is the role's I/O thread: only this thread touches the bus.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlstreams.streams.log.errors import ConfigError, FencedError, StreamsError, TopicMismatchError
from rlstreams.streams.process.owner import when_gone

if TYPE_CHECKING:
    from rlstreams.workers.loop.stall import Watchdog

EXIT_S = 10.0
IDLE_S = 0.02  # longest wait of a tick that has work beside it


class Exit(IntEnum):
    """Exit statuses; `rlstreams.up.supervisor.restart` reacts to them."""

    DONE = 0
    FAILED = 1
    FENCED = 75  # restart once after a pause; twice within ten minutes ends the run
    OWNER_ALIVE = 76  # stop and report it
    CONFIG = 78  # stop and report it


class OwnerAliveError(Exception):
    """Another trainer holds the newest epoch and still writes."""


class Role(Protocol):
    """One worker of one role, as the loop sees it."""

    def tick(self) -> None:
        """Poll, hand work over, commit finished work."""

    def drain(self) -> None:
        """Take no new work; finish the work begun. Called once."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do: drained, or the run's target is reached."""

    def close(self) -> None:
        """Release everything; called once, also after an error."""


class Pausable(Role, Protocol):
    """A role that can be paused."""

    is_paused: bool  # finish the work begun, begin nothing new


@runtime_checkable
class Idling(Protocol):
    """A role that may have nothing to do."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do now."""


@runtime_checkable
class Sharing(Protocol):
    """A role whose memory can leave a device; both methods are called in each tick until True."""

    def give_up_device(self) -> bool:
        """Begin no work there; True once none runs there and the role's memory is free."""

    def take_device(self) -> bool:
        """Load the memory back; True once the role may work there."""


class RoleAround:
    """A `Role` around a `Role`, which it drains once."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._is_draining = False

    def tick(self) -> None:
        """See `Role`."""
        self._role.tick()

    def drain(self) -> None:
        """See `Role`."""
        if not self._is_draining:
            self._is_draining = True
            self._role.drain()

    @property
    def done(self) -> bool:
        """See `Role`."""
        return self._role.done

    def close(self) -> None:
        """See `Role`."""
        self._role.close()


class Stop:
    """Set when this process should drain: SIGTERM, SIGINT, or a supervisor that went away."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def request(self, reason: str) -> None:
        """Ask the loop to drain."""
        self.reason = self.reason or reason
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the loop should drain."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the loop should drain; False: not within this time."""
        return self._event.wait(timeout_s)

    def on_signals(self) -> None:
        """SIGTERM and SIGINT request a stop; only from the main thread."""

        def handler(number: int, _frame: FrameType | None) -> None:
            self.request(signal.Signals(number).name)

        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def when_gone(self, owner: str) -> None:
        """Request a stop when the process that started this one, by `Child`, has ended."""
        when_gone(lambda: self.request(f"{owner} is gone"))


def run(role: Role, stop: Stop, watchdog: Watchdog | None = None) -> None:
    """Drive `role` until it is done; an error passes through after `close`.

    An error of `close` after another error becomes a note of the first one.

    Args:
        watchdog: ends the process with `Exit.FAILED`, and with a stack on stderr, in a tick (or
            `close`) that takes too long; None: it may take for ever.
    """
    draining = False
    if watchdog is None:
        from rlstreams.workers.loop.stall import Watchdog  # not for `--help`

        watchdog = Watchdog(0.0)
    with watchdog:
        try:
            while not role.done:
                watchdog.beat()
                if stop.requested and not draining:
                    draining = True
                    role.drain()
                role.tick()
        except BaseException as reason:
            watchdog.beat()
            _close_after(role, reason)
            raise
        watchdog.beat()
        role.close()


def _close_after(role: Role, reason: BaseException) -> None:
    try:
        role.close()
    except Exception as err:  # noqa: BLE001  (becomes a note)
        reason.add_note(f"then, while it closed: {type(err).__name__}: {err}")


def exit_status(error: BaseException | None) -> Exit:
    """The exit status for the supervisor."""
    if error is None:
        return Exit.DONE
    if isinstance(error, FencedError):
        return Exit.FENCED
    if isinstance(error, OwnerAliveError):
        return Exit.OWNER_ALIVE
    if isinstance(error, ConfigError | TopicMismatchError):
        return Exit.CONFIG
    return Exit.FAILED


def explain(error: BaseException) -> None:
    """Print an error for the user: one line if it was expected, else a traceback."""
    if exit_status(error) is Exit.FAILED and not isinstance(error, StreamsError):
        traceback.print_exception(error, file=sys.stderr)
    else:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        print("\n".join(lines), file=sys.stderr)  # noqa: T201


def end_within(status: int, limit_s: float = EXIT_S) -> None:
    """End the process after `limit_s` with `status`; call it only if the process must end anyway.

    The interpreter joins its threads before it ends: a forward or an optimizer step that is stuck
    would keep a failed process, and its transactional id, for ever.
    """

    def force() -> None:
        time.sleep(limit_s)
        os._exit(status)

    threading.Thread(target=force, name="exit", daemon=True).start()
