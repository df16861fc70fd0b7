"""Becoming the trainer: watch, fence, look again, claim.

Decision 0009 defines what a claim guards. With fencing alone, two supervisors could take the id
from each other forever, so ownership is decided in the log:

1. Fold `steps`. Unless the supervisor reaped the owner, or the owner reported that it was done,
   watch for `lease_s` on our own clock; if the newest epoch writes meanwhile, refuse (no fencing).
   Records that arrive immediately do not count: a dead owner's last ones become readable a moment
   after its commit. A claim that arrives during the watch is from a faster rival: it always counts.
2. Create the producer: this fences the predecessor and settles its last transaction.
3. Fold `steps` again: commits of the predecessor between 1 and 2 count. Settled means that its
   markers are written, so nothing more of it can follow.
4. Commit `TrainerStarted` with the next epoch. From then on lower epochs are void. If two trainers
   get this far at once, the second one's producer fences the first, whose commit then fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlstreams.schemas.events import (
    Event,
    GroupsDropped,
    StepCompleted,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.streams.ledger import OWNED, Ledger
from rlstreams.streams.log.bus import Bus, Producer
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import FencedError
from rlstreams.streams.log.fencing import is_next_epoch
from rlstreams.streams.log.record import Position, Record
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.claims import STEPS_PARTITION
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.loop.runtime import OwnerAliveError
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.replaced import unless_replaced

CATCH_UP_S, LOOK_S = 5.0, 0.05
OnDrop = Callable[[GroupsDropped, Position], None]
LAST_WORDS_SHARE = 1 / 6  # of the lease, at its beginning; heartbeats come every third of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A committed claim: the ledger up to it, and the producer that committed it."""

    ledger: Ledger
    producer: Producer
    claim: TrainerStarted
    position: Position  # of the claim's record


class Intruders:
    """Reads `steps` behind our claim. A later claim ends us, even one that no living trainer made
    and that fenced nobody: every commit behind it is void to every reader (decision 0009). So does
    an event under our own epoch that we did not write: then somebody else writes to the ledger. We
    disown the event, so that it closes no group, and the next claim goes on without it."""

    def __init__(self, context: Context, bus: Bus, claimed: Claimed, writer: LedgerWriter) -> None:
        self._epoch = claimed.claim.epoch
        self._writer = writer
        start = {STEPS_PARTITION: claimed.position.offset + 1}
        self._steps = EventReader(bus, start, context.worker)

    def refuse(self) -> None:
        """Read the records since the last call.

        Raises:
            FencedError: one is a claim, or an event that we did not write; names position and
                writer.
        """
        self._refuse(0.0)

    def refuse_before_step(self) -> None:
        """Read up to our own last record, so that no two steps are made over a foreign event.

        A broker that delivers too slowly is not waited for: then the next iteration finds the
        event. Raises as `refuse`.
        """
        until_s = time.monotonic() + CATCH_UP_S
        while (
            self._steps.positions()[STEPS_PARTITION] <= self._writer.newest_offset
            and time.monotonic() < until_s
        ):
            self._refuse(LOOK_S)

    def _refuse(self, timeout_s: float) -> None:
        found: list[Record[Event]] = []
        for record in self._steps.poll(100, timeout_s):
            event = record.event
            is_ours = self._writer.met(record.position.offset)
            if isinstance(event, OWNED) and event.epoch == self._epoch and not is_ours:
                found.append(record)
            if isinstance(event, TrainerStarted) and is_next_epoch(event, self._epoch):
                raise FencedError(
                    f"{record.position} is a claim of epoch {event.epoch} (instance "
                    f"{event.instance}, host {event.host or 'unknown'}): what this trainer, of "
                    f"epoch {self._epoch}, writes behind it is void. If no such trainer runs, the "
                    "claim is forged, and the next start claims the run again"
                )
        if found:
            self._writer.disown([record.position.offset for record in found])
            named = ", ".join(f"{_named(record.event)} at {record.position}" for record in found)
            raise FencedError(
                f"{named}: under the epoch of this trainer, {self._epoch}, and not written by it. "
                "Somebody else writes to this run: change the broker's password. The events count "
                "for nobody now, and the next start goes on without them"
            )

    def close(self) -> None:
        """Release the reader."""
        self._steps.close()


def _named(event: Event) -> str:
    step = getattr(event, "step", None)
    return type(event).__name__ if step is None else f"{type(event).__name__} of step {step}"


def claim(
    context: Context,
    bus: Bus,
    make_claim: Callable[[Ledger], TrainerStarted],
    on_step: Callable[[StepCompleted], None] = lambda _: None,
) -> Claimed:
    """Take the next epoch.

    Args:
        make_claim: makes the event to commit from the ledger so far; it may refuse by raising.
        on_step: called with each valid step.

    Raises:
        OwnerAliveError: the newest epoch's owner still writes.
        FencedError: somebody else made the same producer meanwhile, whatever error that caused
            here.
    """
    ledger = Ledger(keeps_steps=True)
    ledger.listen(on_step=lambda step, _: on_step(step))
    with EventReader(bus, {STEPS_PARTITION: 0}, context.worker) as reader:
        read_to_end(bus, reader, ledger)
        if not _is_known_dead(context, ledger):
            _watch(context, reader, ledger)
        producer = bus.producer(context.transactional_id)
        with unless_replaced(lambda: _refuse_behind(bus, reader, ledger)):
            read_to_end(bus, reader, ledger)
            event = make_claim(ledger)
        (position,) = producer.commit([outgoing(STEPS, event)])
        ledger.apply(event, position)
    return Claimed(ledger=ledger, producer=producer, claim=event, position=position)


def _is_known_dead(context: Context, ledger: Ledger) -> bool:
    """Whether the owner is surely dead, by the log as it is now: an earlier report of its death may
    be read late, after a successor took over."""
    owner = ledger.claim
    return owner is None or context.takeover or owner.instance in context.reaped


def read_to_end(bus: Bus, reader: EventReader, ledger: Ledger) -> None:
    """Fold all records that are committed now.

    Raises:
        DeadlineError: as `EventReader.up_to`.
    """
    _fold(reader.up_to(bus.ends(STEPS.name)), ledger)


def read_ledger(bus: Bus, reads: str) -> Ledger:
    """The ledger of all of `steps` up to now, for a reader only; `reads` names it in messages.

    Raises:
        DeadlineError: as `read_to_end`.
    """
    ledger = Ledger(keeps_steps=True)
    with EventReader(bus, bus.beginnings(STEPS.name), reads) as reader:
        read_to_end(bus, reader, ledger)
    return ledger


def read_ledger_at(bus: Bus, step: int, reads: str, on_drop: OnDrop) -> Ledger:
    """As `read_ledger`, but up to a step: the ledger of its trainer when that step was committed.

    Args:
        on_drop: see `Ledger.listen`; also called for a drop that its trainer disowned behind the
            step.
    """
    ledger = Ledger(keeps_steps=True)
    ledger.listen(on_drop=on_drop)
    with EventReader(bus, bus.beginnings(STEPS.name), reads) as reader:
        for record in reader.up_to(bus.ends(STEPS.name)):
            event = record.event
            is_before = ledger.last_step < step
            if is_before or (isinstance(event, TrainerHeartbeat) and event.disowned):
                ledger.apply(event, record.position)
    return ledger


def _fold(records: Iterable[Record[Event]], ledger: Ledger) -> bool:
    """Fold records; whether the newest epoch's owner wrote one of them."""
    wrote = False
    for record in records:
        is_valid = ledger.apply(record.event, record.position)
        wrote = wrote or is_valid
    return wrote


def _refuse_behind(bus: Bus, reader: EventReader, ledger: Ledger) -> None:
    """Refuse if the run was claimed between producer and claim, by the log alone: no commit of ours
    could have failed in between.

    Raises:
        FencedError: somebody claimed the run since it was read last.
    """
    epoch = ledger.epoch
    read_to_end(bus, reader, ledger)
    if ledger.claim is not None and ledger.epoch > epoch:
        raise FencedError(
            f"the trainer of epoch {ledger.epoch} (instance {ledger.claim.instance}) claimed the "
            "run before this one did"
        )


def _watch(context: Context, reader: EventReader, ledger: Ledger) -> None:
    if ledger.heartbeat is not None and ledger.heartbeat.state == "done":
        return
    lease_s = context.config.deadlines.lease_s
    epoch, began = ledger.epoch, time.monotonic()
    while (watched_s := time.monotonic() - began) < lease_s:
        wrote = _fold(reader.poll(500, min(0.2, lease_s - watched_s)), ledger)
        if wrote and (ledger.epoch > epoch or watched_s > LAST_WORDS_SHARE * lease_s):
            owner = ledger.claim.instance if ledger.claim else "?"
            host = f" on host {ledger.claim.host}" if ledger.claim and ledger.claim.host else ""
            raise OwnerAliveError(
                f"run {context.config.run.id}: the trainer of epoch {ledger.epoch} (instance "
                f"{owner}{host}) is alive: it wrote to {STEPS.name} within the last {lease_s:g} s"
            )
