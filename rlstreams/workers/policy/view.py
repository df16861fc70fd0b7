"""A fold of `policy-versions`: the versions that can be pulled; and the readers that feed it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlstreams.schemas.events import (
    NO_VERSION,
    Endpoint,
    Event,
    PolicyPublished,
    PolicyStored,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Partition, Record
from rlstreams.streams.log.topics import POLICY_VERSIONS, STEPS
from rlstreams.workers.loop.claims import STEPS_PARTITION, newest_claim
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.weights.channel import STORE

SETTLE_EVERY_S = 1.0
MAX_POLL = 1000
KEPT = 64  # newest versions that are kept beside those that are served


class PolicyView:
    """Versions announced by the newest epoch seen.

    An event of an epoch below the newest one is void: a stopped trainer that woke up wrote it. (So
    is one of an epoch that was never claimed: `PolicyFollower` keeps it from here.) The same number
    with the same hash under a newer epoch only brings new endpoints. A number that is announced
    with two contents is *disputed*, and must not be pulled until `settle` names the one that the
    ledger has.

    A run makes versions without end, so old ones that are no longer served are forgotten, and a
    layout, which is the same for each version, is held once.
    """

    def __init__(self) -> None:
        self._by_version: dict[int, PolicyPublished] = {}
        self._rivals: dict[int, list[PolicyPublished]] = {}
        self._epoch = -1

    def apply(self, event: PolicyPublished | PolicyStored) -> bool:
        """Fold one event in log order; False if it is void."""
        if event.epoch < self._epoch:
            return False
        if isinstance(event, PolicyStored):
            self._stored(event)
            return True
        self._epoch = event.epoch
        version = event.policy_version
        newest = self.newest
        if newest is not None and newest.layout == event.layout:
            event = replace(event, layout=newest.layout)
        known = self._by_version.get(version)
        if version in self._rivals:
            self._rivals[version].append(event)
        elif known is not None and known.weight_hash != event.weight_hash:
            self._rivals[version] = [self._by_version.pop(version), event]
        else:
            self._by_version[version] = event
            self._forget()
        return True

    def _stored(self, event: PolicyStored) -> None:
        """Take that a version is in a store now, and that older ones no longer are."""
        known = self._by_version.get(event.policy_version)
        if known is not None and known.weight_hash == event.weight_hash:
            store = Endpoint(channel=STORE, address=event.address)
            self._by_version[event.policy_version] = _with_store(known, store)
        for version in self.kept:
            if version < event.oldest_version:
                self._by_version[version] = _with_store(self._by_version[version])

    @property
    def kept(self) -> Sequence[int]:
        """Versions that are in a store, oldest first."""
        return sorted(version for version, event in self._by_version.items() if _is_kept(event))

    def newest_in_store(self) -> PolicyPublished | None:
        """The highest version that is in a store."""
        return self._by_version[max(self.kept)] if self.kept else None

    def _forget(self) -> None:
        """Forget old versions; one that is announced again counts as new, without harm."""
        if len(self._by_version) <= 2 * KEPT:
            return
        needed = {*sorted(self._by_version)[-KEPT:], *self.served}
        self._by_version = {v: event for v, event in self._by_version.items() if v in needed}

    @property
    def disputed(self) -> Sequence[int]:
        """Versions that were announced with more than one content, lowest first."""
        return sorted(self._rivals)

    def settle(self, version: int, weight_hash: str) -> None:
        """Settle a dispute by the ledger's content: the last announcement that agrees counts."""
        rivals = self._rivals.pop(version)
        agreeing = [event for event in rivals if event.weight_hash == weight_hash]
        if agreeing:
            self._by_version[version] = agreeing[-1]

    @property
    def newest(self) -> PolicyPublished | None:
        """The event of the highest version."""
        return self._by_version[max(self._by_version)] if self._by_version else None

    @property
    def newest_version(self) -> int:
        """The highest version's number, or NO_VERSION."""
        return max(self._by_version, default=NO_VERSION)

    def get(self, version: int) -> PolicyPublished | None:
        """The event that announced `version`."""
        return self._by_version.get(version)

    @property
    def served(self) -> Sequence[int]:
        """Versions that can be pulled by the newest announcement, oldest first."""
        newest = self.newest
        return () if newest is None else sorted(newest.versions_served)


def _is_kept(event: PolicyPublished) -> bool:
    return any(end.channel == STORE for end in event.endpoints)


def _with_store(event: PolicyPublished, *stores: Endpoint) -> PolicyPublished:
    """The event with these stores in place of its own."""
    others = (end for end in event.endpoints if end.channel != STORE)
    return replace(event, endpoints=(*others, *stores))


class PolicyLedger:
    """Facts of `steps` about announced versions: claimed epochs, and a version's content.

    An announcement lies in another topic, so its order against claims is not known. But its writer
    claimed the run before it announced anything: an epoch above every claim is nobody's. `steps` is
    read only when needed, and all of it only where its end is not enough.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader: EventReader | None = None
        self._ledger = Ledger(keeps_steps=True)
        self._epoch = 0  # the newest claimed epoch so far
        self._read_to: int | None = None  # end of the records that answer the open question

    def has_claim(self, epoch: int) -> bool | None:
        """Whether some trainer claimed `epoch`, or a later one; None: not read yet, ask again.

        Before anything was written to `steps` all epochs pass: a replay into one role has no claim.
        """
        if epoch <= self._epoch:
            return True
        if self._read_to is None:
            self._read_to = self._bus.ends(STEPS.name)[STEPS_PARTITION]
            if claim := newest_claim(self._bus, STEPS.name):
                self._epoch = max(self._epoch, claim.epoch)
        if self._read_to > 0 and epoch > self._epoch:
            self.hashes()
            self._epoch = max(self._epoch, self._ledger.epoch)
            assert self._reader is not None
            if epoch > self._epoch and self._reader.positions()[STEPS_PARTITION] < self._read_to:
                return None
        is_claimed = self._read_to == 0 or epoch <= self._epoch
        self._read_to = None
        return is_claimed

    def hashes(self) -> Mapping[int, str]:
        """Hash by version, as far as was read; reads some new records, never waits."""
        if self._reader is None:
            self._reader = EventReader(self._bus, self._bus.beginnings(STEPS.name), STEPS.name)
        for record in self._reader.poll(MAX_POLL):
            self._ledger.apply(record.event, record.position)
        return self._ledger.hashes

    def close(self) -> None:
        """Release the reader."""
        if self._reader is not None:
            self._reader.close()


class PolicyFollower:
    """Keeps a `PolicyView` up to date; polled from the role's loop."""

    def __init__(self, bus: Bus, *, every_s: float = 0.005) -> None:
        self.view = PolicyView()
        self._ledger = PolicyLedger(bus)
        start = {Partition(POLICY_VERSIONS.name, 0): 0}
        self._reader = EventReader(bus, start, POLICY_VERSIONS.name)
        self._every_s = every_s
        self._next = 0.0
        self._next_settling = 0.0
        # Read, and not admitted yet: a new epoch is looked up in `steps`.
        self._waiting: deque[Record[Event]] = deque()

    def poll(self) -> PolicyView:
        """Read new records, at most every `every_s`; never waits."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            if not self._waiting:
                self._waiting.extend(self._reader.poll(100))
            self._admit()
        if self.view.disputed and now >= self._next_settling:
            self._next_settling = now + SETTLE_EVERY_S
            self._settle()
        return self.view

    def close(self) -> None:
        """Release the readers."""
        self._reader.close()
        self._ledger.close()

    def _admit(self) -> None:
        while self._waiting:
            event, position = self._waiting[0].event, self._waiting[0].position
            if isinstance(event, PolicyPublished | PolicyStored):
                has_claim = self._ledger.has_claim(event.epoch)
                if has_claim is None:
                    return
                if has_claim:
                    self._apply(event)
                else:
                    self._reader.log.warning(
                        "unclaimed_epoch",
                        position=str(position),
                        version=event.policy_version,
                        epoch=event.epoch,
                    )
            self._waiting.popleft()

    def _apply(self, event: PolicyPublished | PolicyStored) -> None:
        known = self.view.disputed
        if not self.view.apply(event):
            self._reader.log.warning(
                "void_version", version=event.policy_version, epoch=event.epoch
            )
        elif self.view.disputed != known:
            self._reader.log.warning(
                "disputed_version", version=event.policy_version, hash=event.weight_hash
            )

    def _settle(self) -> None:
        hashes = self._ledger.hashes()
        for version in self.view.disputed:
            if version in hashes:
                self.view.settle(version, hashes[version])
                self._reader.log.warning("settled_version", version=version, hash=hashes[version])
