"""Becoming the trainer: watch, fence, look again, claim.

Protocol (design, section 5, Claim). Fencing alone lets two supervisors take the id from each other
for ever, so ownership is decided in the log:

1. Fold `steps`. Unless the supervisor reaped the owner, or the owner said that it was done, watch
   for `lease_s` on our own clock; if the newest epoch writes meanwhile, refuse. Nobody is fenced.
2. Make the producer: this fences the predecessor and settles its last transaction.
3. Fold `steps` again: what the predecessor committed between 1 and 2 counts.
4. Commit `TrainerStarted` with the next epoch. From here on lower epochs are void.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from schemas.events import TrainerStarted
from streams.bus import Bus, Producer, Reader
from streams.codec import decoded, outgoing
from streams.record import Partition
from streams.topics import STEPS
from workers.context import Context
from workers.runtime import OwnerAliveError
from workers.trainer.ledger import Ledger

STEPS_PARTITION = Partition(STEPS.name, 0)
READ_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """The office and its tools."""

    ledger: Ledger
    producer: Producer
    claim: TrainerStarted


def claim(context: Context, bus: Bus, make_claim: Callable[[Ledger], TrainerStarted]) -> Claimed:
    """Take the next epoch.

    Args:
        make_claim: the event to commit, from the ledger as it stands; it may refuse by raising.

    Raises:
        OwnerAliveError: the newest epoch's owner still writes.
        FencedError: somebody else made the same producer meanwhile.
    """
    ledger = Ledger()
    with bus.reader({STEPS_PARTITION: 0}) as reader:
        read_to_end(bus, reader, ledger)
        if not context.takeover and ledger.claim is not None:
            _watch(context, reader, ledger)
        producer = bus.producer(context.transactional_id)
        read_to_end(bus, reader, ledger)
        event = make_claim(ledger)
        (position,) = producer.commit([outgoing(STEPS, event)])
        ledger.apply(event, position)
    return Claimed(ledger=ledger, producer=producer, claim=event)


def read_to_end(bus: Bus, reader: Reader, ledger: Ledger) -> None:
    """Fold everything that is committed now.

    Raises:
        TimeoutError: the reader did not get there within READ_DEADLINE_S.
    """
    end = bus.ends(STEPS.name)[STEPS_PARTITION]
    deadline = time.monotonic() + READ_DEADLINE_S
    while (at := reader.positions()[STEPS_PARTITION]) < end:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{STEPS_PARTITION} was read to offset {at} of {end} within {READ_DEADLINE_S:g} s"
            )
        _fold(reader, ledger, 0.2)


def _fold(reader: Reader, ledger: Ledger, timeout_s: float) -> bool:
    """Whether the newest epoch's owner wrote something."""
    alive = False
    for raw in reader.poll(500, timeout_s):
        event = decoded(raw).event
        valid = ledger.apply(event, raw.position)
        alive = alive or valid
    return alive


def _watch(context: Context, reader: Reader, ledger: Ledger) -> None:
    if ledger.heartbeat is not None and ledger.heartbeat.state == "done":
        return
    lease_s = context.config.deadlines.lease_s
    until = time.monotonic() + lease_s
    while time.monotonic() < until:
        if _fold(reader, ledger, 0.2):
            owner = ledger.claim.instance if ledger.claim else "?"
            raise OwnerAliveError(
                f"run {context.config.run.id}: the trainer of epoch {ledger.epoch} (instance "
                f"{owner}) is alive: it wrote to {STEPS.name} within the last {lease_s:g} s"
            )
