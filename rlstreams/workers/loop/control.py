"""The desired state of the run, and leases on its devices: a fold of `control`, its reader, and the
role that follows it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rlstreams.schemas.events import ControlState, Event
from rlstreams.streams.leases import Leases
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Record
from rlstreams.streams.log.topics import CONTROL
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.loop.lease import RoleShifts
from rlstreams.workers.loop.runtime import Pausable, Role, RoleAround

RUNNING, PAUSED, DRAINING = "running", "paused", "draining"
EVERY_S = 0.5
READ_S = 30.0
NOBODY: Mapping[str, int] = MappingProxyType({})


def desired(
    run: str, state: str, *, by: str, reason: str = "", workers: Mapping[str, int] = NOBODY
) -> ControlState:
    """The event to write to `control`.

    Args:
        workers: number of processes by role that `up` is to keep.
    """
    at_ms = now_ms()
    return ControlState(
        run=run, revision=at_ms, state=state, by=by, at_ms=at_ms, reason=reason,
        workers=dict(workers),
    )  # fmt: skip


class ControlFollower:
    """The last state of `control`, polled from the role's loop: RUNNING, PAUSED or DRAINING."""

    def __init__(self, bus: Bus, every_s: float | None = None) -> None:
        self.state = RUNNING  # until one is read
        self.leases = Leases()
        self._every_s = EVERY_S if every_s is None else every_s
        self._bus = bus
        self._reader = EventReader(bus, bus.beginnings(CONTROL.name), CONTROL.name)
        self._next = 0.0

    def poll(self) -> ControlFollower:
        """Read new records, at most every `every_s`; never waits."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._apply(self._reader.poll(1000))
        return self

    def caught_up(self) -> ControlFollower:
        """Read all records that there are now.

        Raises:
            DeadlineError: `control` stopped delivering.
        """
        self._apply(self._reader.up_to(self._bus.ends(CONTROL.name), READ_S))
        return self

    def _apply(self, records: Iterable[Record[Event]]) -> None:
        for record in records:
            if isinstance(record.event, ControlState):
                self.state = record.event.state
            self.leases.apply(record.event)

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()


class ControlledRole(RoleAround):
    """A `Role` around a `Role`: pauses and drains it by `control`, and has it give up and take the
    device that it shares.

    Args:
        paused: the role that takes nothing new while it is paused; `role` may be one around it.
        control: read by this role from now on.
        shifts: for a role whose device is shared: has `paused` give it up and take it; closed with
            this role.
    """

    def __init__(
        self,
        role: Role,
        paused: Pausable,
        control: ControlFollower,
        shifts: RoleShifts | None = None,
    ) -> None:
        super().__init__(role)
        self._paused = paused
        self._control = control
        self._shifts = shifts

    def tick(self) -> None:
        """See `Role`."""
        state = self._control.poll().state
        may_work = True
        if self._shifts is not None:
            may_work = self._shifts.tick(self._paused)
        self._paused.is_paused = state == PAUSED or not may_work
        if state == DRAINING:
            self.drain()
        super().tick()

    def close(self) -> None:
        """See `Role`."""
        self._control.close()
        if self._shifts is not None:
            self._shifts.close()
        super().close()
