"""What content the ledger gives each policy version: a fold of `steps`, read only when needed.

`StepCompleted` is the authority on versions. Followers of announcements consult it only when two of
them disagree, so that normally no one has to read all steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlstreams.schemas.events import Event, RedoDrifted, StepCompleted, TrainerStarted
from rlstreams.streams.log.bus import Bus, Reader
from rlstreams.streams.log.fencing import StepsGate
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.foreign import ForeignRecords

MAX_POLL = 1000


class VersionHashes:
    """A view: weight hash by version."""

    def __init__(self) -> None:
        self._gate = StepsGate()
        self.by_version: dict[int, str] = {}

    def apply(self, event: Event) -> None:
        """Fold one event of `steps` in log order."""
        if not self._gate.admits(event):
            return
        if isinstance(event, TrainerStarted | StepCompleted):
            self.by_version.setdefault(event.policy_version, event.weight_hash)
        elif isinstance(event, RedoDrifted):
            self.by_version.setdefault(event.policy_version, event.actual_hash)


class PolicyLedger:
    """Feeds `VersionHashes`; opens its reader at the first question."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader: Reader | None = None
        self._foreign = ForeignRecords(STEPS.name, bus.schemas())
        self._hashes = VersionHashes()

    def poll(self) -> Mapping[int, str]:
        """Hash by version, as far as was read; takes some of what is new, never waits."""
        if self._reader is None:
            self._reader = self._bus.reader({Partition(STEPS.name, 0): 0})
        for record in self._foreign.readable(self._reader.poll(MAX_POLL, 0.0)):
            self._hashes.apply(record.event)
        return self._hashes.by_version

    def close(self) -> None:
        """Release the reader."""
        if self._reader is not None:
            self._reader.close()
