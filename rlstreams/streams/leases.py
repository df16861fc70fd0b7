"""Leases on devices that roles share: a fold of `control`. Pure.

A shift is granted by `up`, held by its process once its memory is loaded, recalled by `up`, and
released by the process once its memory is given up; `up` writes `lost` for a process that has
ended. An event that does not follow from the state before is void, so a record of a process that
lost its lease changes nothing, and no device ever has two holders.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlstreams.schemas.events import DeviceLease, Event

FREE, GRANTED, HELD, RECALLED, RELEASED, LOST = (
    "free", "granted", "held", "recalled", "released", "lost"
)  # fmt: skip
_FOLLOWS = {
    GRANTED: (FREE,),
    HELD: (GRANTED,),
    RECALLED: (GRANTED, HELD),
    RELEASED: (GRANTED, HELD, RECALLED),
    LOST: (GRANTED, HELD, RECALLED),
}


@dataclass(slots=True)
class Lease:
    """The lease on one device, as of the last event."""

    shift: int = 0
    state: str = FREE
    holder: str = ""  # worker; of a free lease the last holder
    instance: str = ""
    since_ms: int = 0  # begin of this state, by the reader's clock
    held_ms: int = 0  # time at which the holder loaded its memory, likewise; 0: not yet
    begun: set[str] = field(default_factory=set)  # processes that ever held it
    ended: str = ""  # end of the last finished shift: RELEASED or LOST
    is_torn: bool = False  # the first record that was read lies in the middle of a shift

    @property
    def is_free(self) -> bool:
        """Whether no process holds the lease."""
        return self.state == FREE

    def is_of(self, instance: str) -> bool:
        """Whether the present shift is this process's."""
        return not self.is_free and self.instance == instance


class Leases:
    """Folds `DeviceLease` events, by device."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __getitem__(self, device: str) -> Lease:
        return self._leases.setdefault(device, Lease())

    def apply(self, event: Event, read_ms: int = 0) -> bool:
        """Take one event in log order; return False if it is void, or about something else.

        Args:
            read_ms: the reader's clock; 0: times are not needed.
        """
        if not isinstance(event, DeviceLease):
            return False
        lease = self[event.device]
        is_next = event.turn == lease.shift + (event.state == GRANTED)
        is_own = event.state == GRANTED or event.instance == lease.instance
        # A compacted log may begin within a shift, and lack the event that ended it.
        does_follow = lease.state in _FOLLOWS.get(event.state, ())
        does_follow |= lease.is_torn and event.state == GRANTED
        does_follow &= is_next and is_own
        if not does_follow and lease.shift:
            return False
        lease.is_torn = not does_follow
        lease.shift, lease.since_ms = event.turn, read_ms
        lease.holder, lease.instance = event.holder, event.instance
        lease.state = FREE if event.state in (RELEASED, LOST) else event.state
        lease.ended = event.state if lease.is_free else lease.ended
        if event.state == HELD:
            lease.held_ms = read_ms
            lease.begun.add(event.instance)
        elif event.state == GRANTED:
            lease.held_ms = 0
        return True
