"""Shifts of one process on a device that roles share: it works there only while it holds the lease.

`up` grants and recalls shifts in `control`. This process answers in `control` too: `held` once its
memory is loaded, `released` once it is given up. A process makes its role only in its first shift:
before that nothing is loaded. A process whose lease was given to another one ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, runtime_checkable

from rlstreams.schemas.events import DeviceLease
from rlstreams.streams.leases import GRANTED, HELD, RECALLED, RELEASED, Lease, Leases
from rlstreams.streams.log.bus import Producer
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.errors import DeadlineError, StreamsError
from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.streams.log.topics import CONTROL
from rlstreams.workers.config.operation import Device
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.pending import commit
from rlstreams.workers.loop.runtime import Sharing

POLL_S = 0.05  # of `control`, while devices are shared
OFFLOADED, AWAITS_SHIFT = "offloaded", "until its shift on the device"  # in reports


class LeaseLostError(StreamsError):
    """Another process may use the device by now."""


def lock_file(folder: Path, worker: str) -> Path:
    """File that a worker locks while it may have memory on a shared device."""
    return folder / f"{worker}.device.lock"


class RoleShifts(Protocol):
    """A role's part in the shifts on a device."""

    def tick(self, role: object) -> bool:
        """Follow `control`; whether `role` may begin work on the device."""

    def close(self) -> None:
        """Release all resources."""


@runtime_checkable
class Following(Protocol):
    """A role that is to know who has the device, because others work or wait by that."""

    def follow(self, lease: Lease) -> None:
        """Take the lease as it is now."""


class FollowedShifts:
    """Shifts of a process that holds no lease, and works for one that does.

    Args:
        leases: brought up to date by the reader of `control`.
    """

    def __init__(self, device: Device, leases: Leases) -> None:
        self._device, self._leases = device.name, leases

    def tick(self, role: object) -> bool:
        """Pass the lease on to `role`."""
        assert isinstance(role, Following)
        role.follow(self._leases[self._device])
        return True

    def close(self) -> None:
        """Do nothing."""


class Offloading:
    """Hand-over of a device in the background, one change at a time.

    Args:
        give_up, take: begin the change.
    """

    def __init__(
        self, give_up: Callable[[], Future[None]], take: Callable[[], Future[None]]
    ) -> None:
        self.is_here = True  # the memory, once no change is under way
        self.was_used = False
        self._begin = {False: give_up, True: take}
        self._under_way: tuple[bool, Future[None]] | None = None

    def to(self, *, here: bool) -> bool:
        """Whether the memory is where it should be; raises the error of a change."""
        if self._under_way is not None:
            if not self._under_way[1].done():
                return False
            (self.is_here, future), self._under_way = self._under_way, None
            future.result()
        if self.is_here != here:
            self._under_way, self.was_used = (here, self._begin[here]()), True
        return self.is_here == here


class DeviceShifts:
    """The shifts of this process on a shared device.

    Args:
        leases: brought up to date by the reader of `control`.
    """

    def __init__(self, context: Context, device: Device, leases: Leases) -> None:
        self._context = context
        self._device = device.name
        self._leases = leases
        self._producer: Producer | None = None  # made once it is ours: fences the predecessor
        self._has_memory = False
        self._since_s = 0.0  # start of the change under way

    def await_first(self, poll: Callable[[], bool]) -> bool:
        """Wait until this process is granted the device; False: it must end before.

        Args:
            poll: reads `control`; False: this process must end.

        Raises:
            DeadlineError: a predecessor has not left the device in time; names its process.
        """
        while poll():
            self._context.beat()
            lease = self._leases[self._device]
            if lease.is_of(self._context.instance) and lease.state == GRANTED and self._locked():
                self._has_memory = True  # of the role that is made now
                self._since_s = time.monotonic()
                return True
            time.sleep(POLL_S)
        return False

    def _locked(self) -> bool:
        """Take the lock of a process that may have memory on the device, until it ends in any way;
        a predecessor of another `up` may still be ending."""
        try:
            take(lock_file(self._context.folder, self._context.worker))
        except OwnedError as err:
            self._since_s = self._since_s or time.monotonic()
            limit_s = self._context.config.deadlines.drain_s
            if time.monotonic() > self._since_s + limit_s:
                raise DeadlineError(
                    f"{self._context.worker} was granted device {self._device!r}, which process "
                    f"{err.owner} has not left for {limit_s:g} s (deadlines.drain_s): end it"
                ) from err
            return False
        return True

    def tick(self, role: object) -> bool:
        """Follow the lease: give up or take the device; whether `role` may begin work there.

        Raises:
            LeaseLostError: the lease was declared lost while memory is held.
        """
        assert isinstance(role, Sharing)
        lease = self._leases[self._device]
        if isinstance(role, Following):
            role.follow(lease)
        if not lease.is_of(self._context.instance):
            if self._has_memory:
                raise LeaseLostError(
                    f"device {self._device!r} was taken from {self._context.worker}, which had "
                    "not given it up: it ends, to be started again"
                )
            return False
        self._since_s = self._since_s or time.monotonic()
        if lease.state == RECALLED:
            if role.give_up_device():
                self._has_memory = False
                self._write(RELEASED)
        elif lease.state == GRANTED:
            self._has_memory = True
            if role.take_device():
                self._write(HELD)
        elif lease.state == HELD:
            self._since_s = 0.0
        return lease.state == HELD

    def close(self) -> None:
        """Announce nothing: `up` sees the process end, after which its memory is free."""
        if self._producer is not None:
            self._producer.close()

    def _write(self, state: str) -> None:
        lease = self._leases[self._device]
        event = DeviceLease(
            run=self._context.config.run.id,
            device=self._device,
            turn=lease.shift,
            state=state,
            holder=self._context.worker,
            instance=self._context.instance,
            seconds=time.monotonic() - self._since_s,
            by=self._context.worker,
            at_ms=now_ms(),
        )
        if self._producer is None:
            name = f"{self._context.transactional_id}.lease"
            self._producer = self._context.bus.producer(name)
        commit(self._producer, [outgoing(CONTROL, event)])
        self._leases.apply(event)  # reading it back has no effect
        self._since_s = 0.0
