"""The pure core of the audit: records in, what is known of every sample out.

A record of the large topics comes as a row of a few numbers; what is remembered of it is a bit, its
place, and for a sample that no step holds yet the versions of its tokens. `streams/audit_classes`
says from this where each sample is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from schemas.events import (
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from streams.audit_ledger import Ledger
from streams.audit_report import Breaches, BreachKind
from streams.audit_rows import PromptRow, Rows, ScoredRow, TrajectoryRow
from streams.audit_table import (
    DEAD,
    ISSUED,
    MAX_SAMPLES,
    MEASURED,
    NOWHERE,
    ROLLED_OUT,
    SCORED_ONCE,
    SEEN_IN,
    TRAINED,
    Table,
    group_key,
    group_name,
    place_of,
    position_at,
)
from streams.audit_versions import Versions
from streams.record import Partition, Position
from streams.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES

DUPLICATES_NAMED = 20
# (group of the table, sample, [(author, tokens, version)]) of a scored record
_Scored = tuple[int, int, tuple[tuple[bytes, int, int], ...]]


class AuditFold:
    """Takes the records of a run, topics in any order; each topic in the order of its partitions.

    Args:
        expired: first offset left by retention, for partitions where that is not 0.
    """

    def __init__(self, expired: Mapping[Partition, int] | None = None) -> None:
        self.expired = expired or {}
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
        if rows.topic == PROMPTS.name:
            self._prompts(rows.rows, rows.places)
        elif rows.topic == TRAJECTORIES.name:
            self._trajectories(rows.rows, rows.places)
        else:
            self._scored(rows.rows, rows.places)
        for group, sample, place in rows.unreadable:
            self.num_unreadable += 1
            if group:
                self._note(rows.topic, group, sample, 0, place)

    def mark_issued(self) -> None:
        """Every group up to the newest one so far must have been seen when the report is made."""
        self.dense_up_to = self.newest_group

    def settle(self) -> None:
        """Forget what closed groups no longer need; join letters with the records they name."""
        closed = self.table.closed
        self._waiting = {p: held for p, held in self._waiting.items() if not closed[held[0]]}
        for origin in list(self._origins):
            self._mark_dead_at(*origin)

    def _note(self, topic: str, group: bytes, sample: int, size: int, place: int) -> int:
        """Note that a record of the sample exists; its slot, or -1 for all but the first."""
        key = group_key(group)
        if key is None or not 0 <= sample < MAX_SAMPLES:
            name = f"{group.decode('utf-8', 'replace')}/{sample}"
            where = Position(topic, *position_at(place))
            self.breaches.add(BreachKind.BAD_ID, name, f"record at {where}")
            return -1
        table = self.table
        slot = table.first[table.group(key, sample, size)] + sample
        seen = SEEN_IN[topic]
        if table.flags[slot] & seen:
            self._duplicate(topic, slot, place)
            return -1
        table.flags[slot] |= seen
        {ISSUED: table.prompt_at, ROLLED_OUT: table.trajectory_at, SCORED_ONCE: table.scored_at}[
            seen
        ][slot] = place
        return slot

    def _duplicate(self, topic: str, slot: int, place: int) -> None:
        self.num_duplicates += 1
        if len(self.duplicates) < DUPLICATES_NAMED:
            where = Position(topic, *position_at(place))
            self.duplicates.append(f"{self.table.name(slot)} again at {where}")

    def _prompts(self, rows: list[PromptRow], places: list[int]) -> None:
        table = self.table
        for (group, sample, size, purpose), place in zip(rows, places, strict=True):
            key = group_key(group)
            if key is not None and key < 0 and purpose != b"evaluate":
                name = group_name(key)
                self.breaches.add(BreachKind.BAD_ID, name, f"issued for {purpose.decode()!r}")
            slot = self._note(PROMPTS.name, group, sample, size, place)
            if slot < 0 or key is None:
                continue
            number = table.group_of[slot]
            if not table.size[number]:
                table.size[number] = max(1, min(size, MAX_SAMPLES))
            self.newest_group = max(self.newest_group, key)

    def _trajectories(self, rows: list[TrajectoryRow], places: list[int]) -> None:
        used = self.versions.used
        for row, place in zip(rows, places, strict=True):
            group, sample, size, segments, worker, finished_at_ms = row
            if self._note(TRAJECTORIES.name, group, sample, size, place) < 0:
                continue
            for author, version, text, load_id in segments:
                if author == b"policy":
                    used((worker, load_id, version, text), (group, sample), finished_at_ms)

    def _scored(self, rows: list[ScoredRow], places: list[int]) -> None:
        table = self.table
        for (group, sample, size, segments), place in zip(rows, places, strict=True):
            slot = self._note(SCORED.name, group, sample, size, place)
            if slot < 0:
                key = group_key(group)
                if key is None or not 0 <= sample < MAX_SAMPLES:
                    continue
                slot = table.first[table.group(key, sample, size)] + sample
            number = table.group_of[slot]
            if table.used_at[slot] == place:
                self._measure(number, sample, segments)
            elif not table.closed[number]:
                self._waiting[place] = (number, sample, tuple(segments))

    def _measure_fresh(self) -> None:
        """Samples that were scored before this fold saw the step that trained them."""
        for place in self.ledger.fresh:
            held = self._waiting.get(place)
            if held is not None:
                number, sample, segments = held
                slot = self.table.first[number] + sample
                if self.table.used_at[slot] == place:
                    del self._waiting[place]
                    self._measure(number, sample, segments)
        self.ledger.fresh.clear()

    def _measure(
        self, number: int, sample: int, segments: Sequence[tuple[bytes, int, int]]
    ) -> None:
        """Hold the versions of a trained sample's tokens against its step."""
        table, ledger = self.table, self.ledger
        slot = table.first[number] + sample
        if table.flags[slot] & MEASURED:
            return
        table.flags[slot] |= MEASURED
        step = table.closed[number]
        trained = ledger.steps.get(step)
        if trained is None or not table.flags[slot] & TRAINED:
            return
        masked = ledger.masked.pop((number, sample), ())
        oldest: int | None = None
        for index, (author, tokens, version) in enumerate(segments):
            if author != b"policy" or index in masked:
                continue
            staleness = trained.base_version - version
            self.staleness[staleness] += tokens
            oldest = version if oldest is None or version < oldest else oldest
            if staleness < 0 or (trained.bound is not None and staleness > trained.bound):
                detail = (
                    f"step {step}, segment {index}: version {version} "
                    f"trained on {trained.base_version}, bound {trained.bound}"
                )
                self.breaches.add(BreachKind.TOO_STALE, table.name(slot), detail)
        if oldest is not None and oldest != table.oldest[slot]:
            detail = f"step {step} says version {table.oldest[slot]}, tokens {oldest}"
            self.breaches.add(BreachKind.MISLABELLED, table.name(slot), detail)

    def _dead(self, event: DeadLetter) -> None:
        key = group_key(event.group_id.encode())
        if key is not None and 0 <= event.sample < MAX_SAMPLES:
            table = self.table
            table.flags[table.first[table.group(key, event.sample, 0)] + event.sample] |= DEAD
        elif event.origin_topic in SEEN_IN:
            place = place_of(event.origin_partition, event.origin_offset)
            self._origins.add((event.origin_topic, place))

    def _mark_dead_at(self, topic: str, place: int) -> None:
        """A letter that names no sample ends the one whose record lay at its origin."""
        table = self.table
        column = {
            PROMPTS.name: table.prompt_at,
            TRAJECTORIES.name: table.trajectory_at,
            SCORED.name: table.scored_at,
        }[topic]
        try:
            slot = column.index(place) if place != NOWHERE else -1
        except ValueError:
            return  # read later, or a stranger's record
        if slot >= 0:
            table.flags[slot] |= DEAD
            self._origins.discard((topic, place))
