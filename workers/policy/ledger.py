"""What `steps` says of announced versions: which epochs exist, and which content a version has.

An announcement lies in another topic, so its order against claims is not known. But its writer
claimed the run before it announced anything: an epoch above every claim is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus, Reader
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.claims import STEPS_PARTITION, newest_claim
from rlstreams.workers.loop.foreign import ForeignRecords

MAX_POLL = 1000


class PolicyLedger:
    """Reads `steps` only when it is asked, and all of it only where its end says too little."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader: Reader | None = None
        self._foreign = ForeignRecords(STEPS.name, bus.schemas())
        self._ledger = Ledger(keeps_steps=True)
        self._epoch = 0  # the newest claimed that is known
        self._read_to: int | None = None  # what answers the question that is open

    def has_claim(self, epoch: int) -> bool | None:
        """Whether some trainer claimed `epoch`, or a later one; None: ask again, it is being read.

        Before anything was written to `steps` all epochs pass: a replay into one role has none.
        """
        if epoch <= self._epoch:
            return True
        if self._read_to is None:
            self._read_to = self._bus.ends(STEPS.name)[STEPS_PARTITION]
            if claim := newest_claim(self._bus, self._foreign):
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
        """Hash by version, as far as was read; takes some of what is new, never waits."""
        if self._reader is None:
            self._reader = self._bus.reader(self._bus.beginnings(STEPS.name))
        for record in self._foreign.readable(self._reader.poll(MAX_POLL, 0.0)):
            self._ledger.apply(record.event, record.position)
        return self._ledger.hashes

    def close(self) -> None:
        """Release the reader."""
        if self._reader is not None:
            self._reader.close()
