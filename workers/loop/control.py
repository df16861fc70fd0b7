"""The desired state of the run: a fold of `control`, its reader, and the role that follows it."""

from __future__ import annotations

import time

from rlstreams.schemas.events import ControlState
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.topics import CONTROL
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.loop.runtime import Pausable, Role, RoleAround

RUNNING, PAUSED, DRAINING = "running", "paused", "draining"
EVERY_S = 0.5


def desired(run: str, state: str, *, by: str) -> ControlState:
    """What to write to `control`."""
    at_ms = now_ms()
    return ControlState(run=run, revision=at_ms, state=state, by=by, at_ms=at_ms)


class ControlFollower:
    """Knows the last state, polled from the role's loop: RUNNING, PAUSED or DRAINING."""

    def __init__(self, bus: Bus) -> None:
        self.state = RUNNING  # until one is read
        self._reader = bus.reader(bus.beginnings(CONTROL.name))
        self._foreign = ForeignRecords(CONTROL.name, bus.schemas())
        self._next = 0.0

    def poll(self) -> ControlFollower:
        """Read what is new, at most every `EVERY_S`; never waits."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_S
            for record in self._foreign.readable(self._reader.poll(100, 0.0)):
                if isinstance(record.event, ControlState):
                    self.state = record.event.state
        return self

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()


class ControlledRole(RoleAround):
    """A `Role` around a `Role`: pauses and drains it as `control` says.

    Args:
        paused: the role that takes nothing new while it is paused; `role` may be one around it.
    """

    def __init__(self, role: Role, paused: Pausable, bus: Bus) -> None:
        super().__init__(role)
        self._paused = paused
        self._control = ControlFollower(bus)

    def turn(self) -> None:
        """See `Role`."""
        state = self._control.poll().state
        self._paused.is_paused = state == PAUSED
        if state == DRAINING:
            self.drain()
        super().turn()

    def close(self) -> None:
        """See `Role`."""
        self._control.close()
        super().close()
