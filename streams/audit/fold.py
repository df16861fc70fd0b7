"""The pure core of the audit: records in, what is known of every sample out.

A record of the large topics comes as a row of a few numbers; what is remembered of it is a bit, its
place, and for a sample that no step holds yet the versions of its tokens. `streams/audit/classes`
says from this where each sample is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from schemas.events import (
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from streams.audit.ledger import Ledger
from streams.audit.replayed import Replay
from streams.audit.report import Breaches, BreachKind
from streams.audit.rows import PromptRow, Rows, ScoredRow, TrajectoryRow
from streams.audit.table import (
    DEAD,
    MAX_SAMPLES,
    MEASURED,
    NOWHERE,
    SEEN_IN,
    TRAINED,
    Table,
    group_key,
    group_name,
    place_of,
    position_at,
)
from streams.audit.versions import Versions
from streams.record import Partition, Position
from streams.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES

DUPLICATES_NAMED = 20
NO_SLOT = -(1 << 62)
NEVER = 1 << 62  # no offset is higher
_UNKNOWN = (0, 0)  # a group without room
# (group of the table, sample, [(author, tokens, version)]) of a scored record
_Scored = tuple[int, int, tuple[tuple[bytes, int, int], ...]]


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
        self.versions = Versions()
        self.staleness: Counter[int] = Counter()
        self.newest_group = -1
        self.dense_up_to: int | None = None
        self.duplicates: list[str] = []  # the first few, named
        self.num_duplicates = 0
        self.num_unreadable = 0
        self._waiting: dict[int, _Scored] = {}  # by place: scored and not trained yet
        self._origins: set[tuple[str, int]] = set()  # of dead letters that name no sample
        # By group of the table and sample: topic and place of each record that a letter is about.
        self._buried: dict[tuple[int, int], set[tuple[str, int]]] = {}

    def apply(self, event: Event, position: Position) -> None:
        """Take an event of a small topic; those that prove nothing are passed by."""
        if position.topic == STEPS.name:
            self.ledger.apply(event)
            if self.ledger.fresh:
                self._measure_fresh()
        elif isinstance(event, DeadLetter):
            self._dead(event)
        elif isinstance(event, PolicyLoaded):
            self.versions.loaded(event)
        elif isinstance(event, PolicyPublished):
            self.versions.published(event)

    def foresee(self, event: Event) -> None:
        """Take of an event of `steps` which version it made; every one, before `apply`.

        Versions that were used may be newer than the steps that this audit accounts for.
        """
        if isinstance(event, TrainerStarted | StepCompleted | RedoDrifted):
            self.versions.ledger(event)

    def add(self, rows: Rows) -> None:
        """Take records of a large topic."""
        if rows.replay is not None:
            self.replay.merge(rows.replay)
            rows = rows.by_origin() if self.replay.is_by_origin else rows
        if rows.topic == PROMPTS.name:
            self._prompts(rows.rows, rows.places)
        elif rows.topic == TRAJECTORIES.name:
            self._trajectories(rows.rows, rows.places)
        else:
            self._scored(rows.rows, rows.places)
        for group, sample, place in rows.unreadable:
            self.num_unreadable += 1
            if group:
                self._slots(rows.topic, [(group, sample, 0, ())], [place])

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
        closed = self.table.closed
        self._waiting = {p: held for p, held in self._waiting.items() if not closed[held[0]]}
        for origin in list(self._origins):
            self._mark_dead_at(*origin)

    def _slots(
        self, topic: str, rows: Sequence[PromptRow | TrajectoryRow | ScoredRow], places: list[int]
    ) -> list[int]:
        """Note that these records exist; for each its slot, below 0 for all but the first.

        NO_SLOT stands for a sample that cannot be; `~slot` for one that had a record already. The
        loop is what an audit does most often, so its groups are looked up once a batch.
        """
        table, seen = self.table, SEEN_IN[topic]
        flags, column = table.flags, self._column(topic)
        known: dict[bytes, tuple[int, int]] = {}  # by group text: first slot and room
        slots: list[int] = []
        for row, place in zip(rows, places, strict=True):
            group, sample, size = row[:3]
            first, room = known.get(group, _UNKNOWN)
            if not 0 <= sample < room >= size:
                found = self._group(topic, group, sample, size, place)
                if found is None:
                    slots.append(NO_SLOT)
                    continue
                first, room = known[group] = found
            slot = first + sample
            if flags[slot] & seen:
                self._duplicate(topic, slot, place)
                slot = ~slot
            else:
                flags[slot] |= seen
                column[slot] = place
            slots.append(slot)
        return slots

    def _group(
        self, topic: str, group: bytes, sample: int, size: int, place: int
    ) -> tuple[int, int] | None:
        """First slot and room of the record's group, with room for it; None: no such sample."""
        key = group_key(group)
        if key is None or not 0 <= sample < MAX_SAMPLES:
            name = f"{group.decode('utf-8', 'replace')}/{sample}"
            where = Position(topic, *position_at(place))
            self.breaches.add(BreachKind.BAD_ID, name, f"record at {where}")
            return None
        number = self.table.group(key, sample, size)
        return self.table.first[number], self.table.room[number]

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

    def _prompts(self, rows: list[PromptRow], places: list[int]) -> None:
        table = self.table
        keys, sizes, group_of = table.keys, table.size, table.group_of
        slots = self._slots(PROMPTS.name, rows, places)
        for (_, _, size, purpose), slot in zip(rows, slots, strict=True):
            if slot == NO_SLOT:
                continue
            number = group_of[max(slot, ~slot)]
            key = keys[number]
            if key < 0 and purpose != b"evaluate":
                said = purpose.decode("utf-8", "replace")
                self.breaches.add(BreachKind.BAD_ID, group_name(key), f"issued for {said!r}")
            if slot >= 0:
                if not sizes[number]:
                    sizes[number] = max(1, min(size, MAX_SAMPLES))
                self.newest_group = max(self.newest_group, key)

    def _trajectories(self, rows: list[TrajectoryRow], places: list[int]) -> None:
        """Who used which weights, and when first: told once a batch for each that are the same."""
        uses: dict[tuple[bytes, tuple[Any, ...]], tuple[int, bytes, int]] = {}
        slots = self._slots(TRAJECTORIES.name, rows, places)
        for (group, sample, _, segments, worker, finished_at_ms), slot in zip(
            rows, slots, strict=True
        ):
            if slot < 0:
                continue
            key = (worker, tuple(segments))
            use = uses.get(key)
            if use is None:
                uses[key] = (finished_at_ms, group, sample)
            elif finished_at_ms < use[0]:
                uses[key] = (finished_at_ms, *use[1:])
        for (worker, segments), (finished_at_ms, group, sample) in uses.items():
            for author, version, text, load_id in segments:
                if author == b"policy":
                    load = (worker, load_id, version, text)
                    self.versions.used(load, (group, sample), finished_at_ms)

    def _scored(self, rows: list[ScoredRow], places: list[int]) -> None:
        table = self.table
        used_at, group_of, closed = table.used_at, table.group_of, table.closed
        slots = self._slots(SCORED.name, rows, places)
        for row, place, found in zip(rows, places, slots, strict=True):
            if found == NO_SLOT:
                continue
            slot = max(found, ~found)
            number = group_of[slot]
            if used_at[slot] == place:
                self._measure(number, slot, row[3])
            elif not closed[number]:
                self._waiting[place] = (number, row[1], tuple(row[3]))

    def _measure_fresh(self) -> None:
        """Samples that were scored before this fold saw the step that trained them."""
        for place in self.ledger.fresh:
            held = self._waiting.get(place)
            if held is not None:
                number, sample, segments = held
                slot = self.table.first[number] + sample
                if self.table.used_at[slot] == place:
                    del self._waiting[place]
                    self._measure(number, slot, segments)
        self.ledger.fresh.clear()

    def _measure(self, number: int, slot: int, segments: Sequence[tuple[bytes, int, int]]) -> None:
        """Hold the versions of a trained sample's tokens against its step."""
        table, ledger = self.table, self.ledger
        flags = table.flags[slot]
        if flags & MEASURED:
            return
        table.flags[slot] = flags | MEASURED
        step = table.closed[number]
        trained = ledger.steps.get(step)
        if trained is None or not flags & TRAINED:
            return
        masked: Collection[int] = ()
        if ledger.masked:
            masked = ledger.masked.pop((number, slot - table.first[number]), ())
        base, bound = trained.base_version, trained.bound
        oldest: int | None = None
        for index, (author, tokens, version) in enumerate(segments):
            if author != b"policy" or index in masked:
                continue
            staleness = base - version
            self.staleness[staleness] += tokens
            if oldest is None or version < oldest:
                oldest = version
            if staleness < 0 or (bound is not None and staleness > bound):
                detail = (
                    f"step {step}, segment {index}: version {version} "
                    f"trained on {base}, bound {bound}"
                )
                self.breaches.add(BreachKind.TOO_STALE, table.name(slot), detail)
        if oldest is not None and oldest != table.oldest[slot]:
            detail = f"step {step} says version {table.oldest[slot]}, tokens {oldest}"
            self.breaches.add(BreachKind.MISLABELLED, table.name(slot), detail)

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
