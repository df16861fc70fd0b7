"""The desired state of the run: a fold of `control`, and the reader that feeds it."""

from __future__ import annotations

import time

from rlstreams.schemas.events import ControlState
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.topics import CONTROL
from rlstreams.workers.loop.foreign import ForeignRecords

RUNNING, PAUSED, DRAINING = "running", "paused", "draining"
EVERY_S = 0.5


class ControlFollower:
    """Knows the last `ControlState`; polled from the role's loop. `running` until one is read."""

    def __init__(self, bus: Bus) -> None:
        self.desired: ControlState | None = None
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
                    self.desired = record.event
        return self

    @property
    def state(self) -> str:
        """RUNNING, PAUSED or DRAINING."""
        return self.desired.state if self.desired else RUNNING

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
