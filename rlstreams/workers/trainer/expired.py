"""Restart after a pause that was longer than the log keeps payloads: open groups are given up.

Trained samples are in the checkpoint and in `steps`; samples that waited for a step are gone, in
part or as a whole. It is not worth finding out which samples of an open group are left: there are
never more open groups than pacing allows, each is closed with the reason `expired`, and `prompts`
issues another one for it.
"""

from __future__ import annotations

from rlstreams.schemas.events import TRAIN, ClosedGroups, DroppedGroup, Prompt
from rlstreams.streams.ledger import EXPIRED, Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.group_ids import issue_number
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, SCORED, TRAJECTORIES
from rlstreams.workers.loop.foreign import events_now
from rlstreams.workers.loop.log import Log
from rlstreams.workers.trainer.intake.closed import ClosedSet
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.redo.retention import RetentionError, check_open


def drop_expired(bus: Bus, ledger: Ledger, writer: LedgerWriter, log: Log) -> int:
    """Close every open group if retention has removed records of some; returns their number.

    Raises:
        DeadlineError: `prompts` could not be read.
    """
    if not has_expired(bus, ledger):
        return 0
    groups = open_groups(bus, ledger.closed)
    if groups:
        numbers = [int(group.group_id) for group in groups]
        ledger.closed = ClosedSet(ledger.closed).union(numbers).event()
        writer.groups_dropped(groups, ledger.closed, ())
    ledger.positions = ()
    log.warning("expired", groups=len(groups))
    return len(groups)


def refuse_expired(bus: Bus, ledger: Ledger) -> None:
    """Refuse to go on if samples that wait for a step are gone.

    Raises:
        RetentionError: as `check_open`.
    """
    beginnings = {**bus.beginnings(SCORED.name), **bus.beginnings(DEAD_LETTERS.name)}
    check_open(ledger.positions, beginnings, ledger.last_step)


def has_expired(bus: Bus, ledger: Ledger) -> bool:
    """Whether retention has removed records that an open group may need."""
    try:
        refuse_expired(bus, ledger)
    except RetentionError:
        return True
    # Before the first step there are no positions, and trajectories have none in the ledger: a
    # partition that had records and is empty has lost all to retention.
    return any(_is_emptied(bus, topic) for topic in (SCORED.name, TRAJECTORIES.name))


def _is_emptied(bus: Bus, topic: str) -> bool:
    begins, ends = bus.beginnings(topic), bus.ends(topic)
    return any(0 < end <= begins[partition] for partition, end in ends.items())


def open_groups(bus: Bus, closed: ClosedGroups) -> list[DroppedGroup]:
    """Every training group that was issued and is not closed, in issue order."""
    found: dict[int, Prompt] = {}
    is_closed = ClosedSet(closed)
    for prompt in events_now(bus, bus.beginnings(PROMPTS.name), Prompt, "trainer"):
        number = issue_number(prompt.group_id)
        if prompt.purpose == TRAIN and number is not None and number not in is_closed:
            found.setdefault(number, prompt)
    return [_dropped(found[number]) for number in sorted(found)]


def _dropped(prompt: Prompt) -> DroppedGroup:
    return DroppedGroup(
        group_id=prompt.group_id,
        reason=EXPIRED,
        permanent=False,
        staleness=0,
        row=prompt.row,
        dataset_epoch=prompt.dataset_epoch,
        replacement=prompt.replacement,
        detail="retention had removed records when the run went on",
    )
