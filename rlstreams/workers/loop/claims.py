"""The newest claim in `steps`, found from its end, without the history of a long run."""

from __future__ import annotations

import time

from rlstreams.schemas.events import TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.foreign import EventReader, near_end

STEPS_PARTITION = Partition(STEPS.name, 0)
TAIL = 64  # offsets: a trainer's last heartbeat is not far from the end
CLAIM_S = 5.0  # to read a few records whose offsets are known


def claim_at(bus: Bus, offset: int, reader: str) -> TrainerStarted | None:
    """The claim at this offset; None: there is none, or `CLAIM_S` was not enough to read it.

    Args:
        reader: name of the reader, for the log.
    """
    if offset < 0:
        return None  # of an older trainer, which does not report its claim's place
    until_s = time.monotonic() + CLAIM_S
    with EventReader(bus, {STEPS_PARTITION: offset}, reader) as steps:
        while time.monotonic() < until_s:
            for record in steps.poll(1, 0.2):
                return record.event if isinstance(record.event, TrainerStarted) else None
    return None


def newest_claim(bus: Bus, reader: str) -> TrainerStarted | None:
    """The newest claim among the last `TAIL` records, or that they point to; None: neither."""
    start = near_end(bus, STEPS.name, TAIL)
    end = bus.ends(STEPS.name)[STEPS_PARTITION]
    claim: TrainerStarted | None = None
    beat: TrainerHeartbeat | None = None
    until_s = time.monotonic() + CLAIM_S
    with EventReader(bus, start, reader) as steps:
        while steps.positions()[STEPS_PARTITION] < end and time.monotonic() < until_s:
            for record in steps.poll(TAIL, 0.2):
                if isinstance(record.event, TrainerStarted):
                    claim = record.event
                elif isinstance(record.event, TrainerHeartbeat):
                    beat = record.event
    return claim if claim or not beat else claim_at(bus, beat.claim_offset, reader)
