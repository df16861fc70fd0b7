"""Which policy versions there are: a fold of `policy-versions`, and the reader that feeds it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from schemas.events import NO_VERSION, PolicyPublished
from streams.bus import Bus
from streams.codec import decoded
from streams.record import Partition
from streams.topics import POLICY_VERSIONS


class PolicyConflictError(Exception):
    """One version number with two contents: the ledger cannot be trusted."""


class PolicyView:
    """Versions announced by the newest epoch seen.

    An event of an epoch below the newest one is void: a stopped trainer that woke up wrote it. The
    same number with the same hash under a newer epoch only brings new endpoints.
    """

    def __init__(self) -> None:
        self._by_version: dict[int, PolicyPublished] = {}
        self._epoch = -1

    def apply(self, event: PolicyPublished) -> None:
        """Fold one event in log order.

        Raises:
            PolicyConflictError: the number stands for another hash already.
        """
        if event.epoch < self._epoch:
            return
        self._epoch = event.epoch
        known = self._by_version.get(event.policy_version)
        if known is not None and known.weight_hash != event.weight_hash:
            raise PolicyConflictError(
                f"policy version {event.policy_version} was published with hash "
                f"{known.weight_hash} (epoch {known.epoch}) and again with "
                f"{event.weight_hash} (epoch {event.epoch})"
            )
        self._by_version[event.policy_version] = event

    @property
    def newest(self) -> PolicyPublished | None:
        """The highest version."""
        return self._by_version[max(self._by_version)] if self._by_version else None

    @property
    def newest_version(self) -> int:
        """Its number, or NO_VERSION."""
        return max(self._by_version, default=NO_VERSION)

    def get(self, version: int) -> PolicyPublished | None:
        """The event that announced `version`."""
        return self._by_version.get(version)

    @property
    def served(self) -> Sequence[int]:
        """Versions that the newest announcement says can be pulled, oldest first."""
        newest = self.newest
        return () if newest is None else sorted(newest.versions_served)


class PolicyFollower:
    """Keeps a `PolicyView` up to date; polled from the role's loop."""

    def __init__(self, bus: Bus, *, every_s: float = 0.02) -> None:
        self.view = PolicyView()
        self._reader = bus.reader({Partition(POLICY_VERSIONS.name, 0): 0})
        self._every_s = every_s
        self._next = 0.0

    def poll(self) -> PolicyView:
        """Read what is new, at most every `every_s`; never waits."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            for raw in self._reader.poll(100, 0.0):
                event = decoded(raw).event
                if isinstance(event, PolicyPublished):
                    self.view.apply(event)
        return self.view

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
