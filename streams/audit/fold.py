"""The pure core of the audit: records in, what is known of every sample out.

A record of the large topics comes as a row of a few numbers; what is remembered of it is a bit, its
place, and for a sample that no step holds yet the versions of its tokens. `streams/audit/classes`
says from this where each sample is.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.schemas.walk import Numbers
from rlstreams.streams.audit.ledger import Ledger, UnreadStep
from rlstreams.streams.audit.measure import Measure
from rlstreams.streams.audit.replayed import Replay
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.rows import Rows
from rlstreams.streams.audit.table import (
    DEAD,
    MAX_SAMPLES,
    NO_GROUP,
    NOWHERE,
    SEEN_IN,
    Table,
    group_key,
    group_name,
    place_of,
    position_at,
)
from rlstreams.streams.audit.versions import Versions
from rlstreams.streams.log.record import Partition, Position
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES

DUPLICATES_NAMED = 20
NO_SLOT = -(1 << 62)
NEVER = 1 << 62  # no offset is higher


class AuditFold:
    """Takes the records of a run, topics in any order; each topic in the order of its partitions.

    Args:
        expired: first offset left by retention, for partitions where that is not 0.
    """

    def __init__(self, expired: Mapping[Partition, int] | None = None) -> None:
        self.expired = expired or {}
        self.replay = Replay()
        self.breaches = Breaches()
        self.table = Table()
        self.ledger = Ledger(self.breaches, self.table)
        self.measure = Measure(self.table, self.ledger, self.breaches)
        self.versions = Versions()
        self.newest_group = -1
        self.dense_up_to: int | None = None
        self.duplicates: list[str] = []  # the first few, named
        self.num_duplicates = 0
        self.num_unreadable = 0
        self._origins: set[tuple[str, int]] = set()  # of dead letters that name no sample
        # By group of the table and sample: topic and place of each record that a letter is about.
        self._buried: dict[tuple[int, int], set[tuple[str, int]]] = {}

    def apply(self, event: Event | UnreadStep, position: Position) -> None:
        """Take an event of a small topic; those that prove nothing are passed by."""
        if isinstance(event, UnreadStep) or position.topic == STEPS.name:
            self.ledger.apply(event)
            if self.ledger.fresh:
                self.measure.fresh()
        elif isinstance(event, DeadLetter):
            self._dead(event)
        elif isinstance(event, PolicyLoaded):
            self.versions.loaded(event)
        elif isinstance(event, PolicyPublished):
            self.versions.published(event)

    def foresee(self, event: Event | UnreadStep) -> None:
        """Take of an event of `steps` which version it made; every one, before `apply`.

        Versions that were used may be newer than the steps that this audit accounts for.
        """
        if isinstance(event, UnreadStep):
            self.versions.num_unread += 1
        elif isinstance(event, TrainerStarted | StepCompleted | RedoDrifted):
            self.versions.ledger(event)

    def add(self, rows: Rows) -> None:
        """Take records of a large topic."""
        if rows.replay is not None:
            self.replay.merge(rows.replay)
            rows = rows.by_origin() if self.replay.is_by_origin else rows
        slots = self._slots(rows)
        if rows.topic == PROMPTS.name:
            self._prompts(rows, slots)
        elif rows.topic == TRAJECTORIES.name:
            self._trajectories(rows, slots)
        else:
            self._scored(rows, slots)
        self._unreadable(rows)

    def begins(self, partition: Partition) -> int:
        """Below this offset nothing of a partition can be known: retention removed it, or it was
        not recorded.
        """
        if self.replay.is_by_origin:
            return self.replay.first.get(partition, NEVER)
        return self.expired.get(partition, 0)

    def mark_issued(self) -> None:
        """Every group up to the newest one so far must have been seen when the report is made."""
        self.dense_up_to = self.newest_group

    def settle(self) -> None:
        """Forget what closed groups no longer need; join letters with the records they name."""
        self.measure.settle()
        for origin in list(self._origins):
            self._mark_dead_at(*origin)

    def _slots(self, rows: Rows) -> Numbers:
        """Note that these records exist; for each its slot, below 0 for all but the first.

        NO_SLOT stands for a sample that cannot be; `~slot` for one that had a record already.
        """
        fits = (rows.group != NO_GROUP) & (rows.sample >= 0) & (rows.sample < MAX_SAMPLES)
        for row in np.flatnonzero(~fits).tolist():
            self._bad_id(rows, row)
        which = np.flatnonzero(fits)
        slots, places = np.full(len(fits), NO_SLOT), rows.place[which]
        slot = self.table.slots(rows.group[which], rows.sample[which], rows.size[which])
        flags = np.frombuffer(self.table.flags, np.uint8)
        seen = np.uint8(SEEN_IN[rows.topic])
        _, first = np.unique(slot, return_index=True)
        is_new = np.zeros(len(slot), np.bool_)
        is_new[first] = (flags[slot[first]] & seen) == 0
        new = slot[is_new]
        flags[new] |= seen
        np.frombuffer(self._column(rows.topic), np.int64)[new] = places[is_new]
        slots[which] = np.where(is_new, slot, ~slot)
        for at in np.flatnonzero(~is_new).tolist():
            self._duplicate(rows.topic, int(slot[at]), int(places[at]))
        return slots

    def _bad_id(self, rows: Rows, row: int) -> None:
        group = rows.names.get(row)
        shown = group_name(int(rows.group[row])) if group is None else _shown(group)
        where = Position(rows.topic, *position_at(int(rows.place[row])))
        self.breaches.add(BreachKind.BAD_ID, f"{shown}/{rows.sample[row]}", f"record at {where}")

    def _unreadable(self, rows: Rows) -> None:
        """What their headers tell of records that cannot be read."""
        self.num_unreadable += len(rows.unreadable)
        told = [one for one in rows.unreadable if one[0] != NO_GROUP]
        if told:
            group, sample, place = np.array(told, np.int64).T
            size = np.zeros_like(group)
            topic = rows.topic
            self._slots(Rows(topic=topic, place=place, group=group, sample=sample, size=size))

    def _column(self, topic: str) -> array[int]:
        """Where records of this topic lie, by slot."""
        table = self.table
        return {
            PROMPTS.name: table.prompt_at,
            TRAJECTORIES.name: table.trajectory_at,
            SCORED.name: table.scored_at,
        }[topic]

    def _duplicate(self, topic: str, slot: int, place: int) -> None:
        self.num_duplicates += 1
        if len(self.duplicates) < DUPLICATES_NAMED:
            where = Position(topic, *position_at(place))
            self.duplicates.append(f"{self.table.name(slot)} again at {where}")

    def _prompts(self, rows: Rows, slots: Numbers) -> None:
        for row, purpose in rows.purposes.items():
            if slots[row] != NO_SLOT and purpose != b"evaluate":
                name = group_name(int(rows.group[row]))
                self.breaches.add(BreachKind.BAD_ID, name, f"issued for {_shown(purpose)!r}")
        new = np.flatnonzero(slots >= 0)
        if not len(new):
            return
        numbers = np.frombuffer(self.table.group_of, np.int32)[slots[new]]
        groups, first = np.unique(numbers, return_index=True)
        told = rows.size[new[first]].tolist()
        sizes = self.table.size
        for number, size in zip(groups.tolist(), told, strict=True):
            if not sizes[number]:
                sizes[number] = max(1, min(size, MAX_SAMPLES))
        self.newest_group = max(self.newest_group, int(rows.group[new].max()))

    def _trajectories(self, rows: Rows, slots: Numbers) -> None:
        """Who used which weights, and when first: told once for all that are the same."""
        segments = rows.segments
        if segments is None:
            return
        used = np.flatnonzero(slots[segments.row] >= 0)
        loads, row = segments.load[used], segments.row[used]
        earliest = np.full(len(rows.loads), NEVER)
        np.minimum.at(earliest, loads, rows.finished_ms[row])
        distinct, first = np.unique(loads, return_index=True)
        for load, at in zip(distinct.tolist(), row[first].tolist(), strict=True):
            sample = int(rows.group[at]), int(rows.sample[at])
            self.versions.used(rows.loads[load], sample, int(earliest[load]))

    def _scored(self, rows: Rows, slots: Numbers) -> None:
        segments = rows.segments
        if segments is None:
            return
        at = np.flatnonzero(slots != NO_SLOT)
        chosen = segments.of(at, len(slots))
        self.measure.scored(np.maximum(slots[at], ~slots[at]), rows.place[at], chosen)

    def _dead(self, event: DeadLetter) -> None:
        key = group_key(event.group_id.encode())
        origin = event.origin_topic, place_of(event.origin_partition, event.origin_offset)
        if key is not None and 0 <= event.sample < MAX_SAMPLES:
            number = self.table.group(key, event.sample, 0)
            self._bury(self.table.first[number] + event.sample, origin)
        elif event.origin_topic in SEEN_IN:
            self._origins.add(origin)

    def _bury(self, slot: int, origin: tuple[str, int]) -> None:
        self.table.flags[slot] |= DEAD
        number = self.table.group_of[slot]
        sample = slot - self.table.first[number]
        self._buried.setdefault((number, sample), set()).add(origin)

    def is_end_of_trained(self, slot: int) -> bool:
        """Whether a letter for this trained sample is about what was trained.

        The trainer trains a sample of which one record is fine, and writes a letter about a copy
        that is not; the copy is a duplicate. So a letter is against the ledger if it is about the
        very record that the step took, or about the sample's first one in another topic, which that
        was made from; also where retention hides that one.
        """
        table = self.table
        number = table.group_of[slot]
        made_of = {
            SCORED.name: table.used_at[slot],
            TRAJECTORIES.name: table.trajectory_at[slot],
            PROMPTS.name: table.prompt_at[slot],
        }
        return any(
            made_of.get(topic, NOWHERE) in (place, NOWHERE)
            for topic, place in self._buried[number, slot - table.first[number]]
        )

    def _mark_dead_at(self, topic: str, place: int) -> None:
        """A letter that names no sample ends the one whose record lay at its origin."""
        column = self._column(topic)
        try:
            slot = column.index(place) if place != NOWHERE else -1
        except ValueError:
            return  # read later, or a stranger's record
        if slot >= 0:
            self._bury(slot, (topic, place))
            self._origins.discard((topic, place))


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")
