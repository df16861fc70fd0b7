"""The trainer's side of an audit: what `steps` says was trained, dropped, left out and redone.

Of two events for one step the first counts; what a fenced epoch wrote is void and counts for
nothing. Samples and groups are noted in the table that the other topics are held against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlstreams.schemas.events import (
    ClosedGroups,
    DroppedGroup,
    Event,
    GroupsDropped,
    RedoDrifted,
    SampleRef,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.table import (
    MAX_SAMPLES,
    NOWHERE,
    OFFSET_BITS,
    TRAINED,
    Table,
    group_key,
    group_name,
    place_of,
)
from rlstreams.streams.log.fencing import EpochGate
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import SCORED

_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """In place of an event: a record of `steps` that may be one, and that cannot be read."""

    position: Position
    detail: str  # its schema's fingerprint, and what is wrong


@dataclass(frozen=True, slots=True)
class Trained:
    """What the samples of one step were trained on."""

    base_version: int  # staleness counts from it
    bound: int | None  # max_staleness in force


class Ledger:
    """Folds `steps`."""

    def __init__(self, breaches: Breaches, table: Table) -> None:
        self._breaches = breaches
        self._table = table
        self._gate = EpochGate()
        self._recorded = ClosedGroups(watermark=0)  # the closed set of the newest event
        self._hashes: dict[int, set[str]] = {}  # by step: what the next one may start from
        self._reasons: dict[str, int] = {}
        self.run = ""
        self.bound: int | None = None
        self.trainer_state = ""  # of the newest heartbeat
        self.last_step = 0
        self.policy_version = -1
        self.steps: dict[int, Trained] = {}
        self.masked: dict[tuple[int, int], frozenset[int]] = {}  # by group and sample of the table
        self.absent: dict[tuple[int, int], str] = {}  # likewise: why it is not in the batch
        self.positions: Mapping[int, int] = {}  # of scored-trajectories, by partition
        self.fresh: list[int] = []  # places of samples trained since it was last emptied
        self.redone: list[StepsRedone] = []
        self.num_drifted = 0
        self.num_trained_twice = 0
        self.num_masked = 0
        self.num_void = 0
        self._num_unread = 0
        self._is_unread_newest = False  # no closed set was read behind an unreadable record
        self._is_gap = False  # an unreadable record lies behind the newest step

    @property
    def reasons(self) -> list[str]:
        """Why groups were dropped; a closed group's `-n` means the reason n - 1."""
        return list(self._reasons)

    def apply(self, event: Event | UnreadStep) -> None:
        """Take one event of `steps`."""
        if isinstance(event, UnreadStep):
            self._unread(event)
        elif not self._gate.admits(event):
            self.num_void += 1
        elif isinstance(event, StepCompleted):
            self._step(event)
        elif isinstance(event, TrainerHeartbeat):
            self.trainer_state = event.state
        elif isinstance(event, GroupsDropped):
            self._record(event.closed)
            for group in event.groups:
                self._drop(group)
        elif isinstance(event, TrainerStarted):
            self._claim(event)
        elif isinstance(event, RedoDrifted):
            self.num_drifted += 1
            self._hashes.setdefault(event.step, set()).add(event.actual_hash)
            self._number(f"redo of step {event.step}", event.policy_version)
        elif isinstance(event, StepsRedone):
            self.redone.append(event)

    def may_be_closed(self, number: int) -> bool:
        """Whether an unreadable record may have closed a group that no event closed.

        One that the newest closed set leaves out, read behind that record, is open.
        """
        if not self._num_unread:
            return False
        recorded = self._recorded
        is_recorded = number < recorded.watermark or number in recorded.above
        return is_recorded or self._is_unread_newest

    def check_closed_set(self, breaches: Breaches) -> None:
        """Hold the newest recorded closed set against the groups that events closed.

        A group of the set that no event closed was closed by a record that cannot be read, if there
        is one.
        """
        table, watermark = self._table, self._recorded.watermark
        closed = {
            key
            for key, is_closed in zip(table.keys, table.closed, strict=True)
            if is_closed and key >= 0
        }
        above = {key for key in closed if key >= watermark}
        recorded = set(self._recorded.above)
        for number in sorted(above - recorded):
            self._wrong_set(breaches, number, "the set leaves it out")
        if self._num_unread:
            return
        for number in sorted(recorded - above):
            self._wrong_set(breaches, number, "no event closed it")
        num_missing = watermark - (len(closed) - len(above))
        number = 0
        while num_missing > 0 and breaches.has_room(BreachKind.CLOSED_SET):
            if number not in closed:
                self._wrong_set(breaches, number, "no event closed it")
                num_missing -= 1
            number += 1
        breaches.add_unseen(BreachKind.CLOSED_SET, max(0, num_missing))

    def _wrong_set(self, breaches: Breaches, number: int, says: str) -> None:
        breaches.add(BreachKind.CLOSED_SET, str(number), f"in the newest closed set: {says}")

    def _unread(self, step: UnreadStep) -> None:
        self._num_unread += 1
        self._is_unread_newest = self._is_gap = True
        self._breaches.add(BreachKind.UNREADABLE_STEP, str(step.position), step.detail)

    def _record(self, closed: ClosedGroups) -> None:
        self._recorded = closed
        self._is_unread_newest = False

    def _claim(self, event: TrainerStarted) -> None:
        self.run = event.run
        self.bound = _bound(event.config)
        self.trainer_state = ""
        if self.policy_version < 0:
            self.policy_version = event.policy_version

    def _step(self, event: StepCompleted) -> None:
        name = f"step {event.step}"
        if event.step <= self.last_step:
            self._breaches.add(BreachKind.STEP_TWICE, name, f"again in epoch {event.epoch}")
            return
        if event.step != self.last_step + 1 and not self._is_gap:
            detail = f"comes after step {self.last_step}" if self.last_step else "is the first one"
            self._breaches.add(BreachKind.STEP_MISSING, name, detail)
        before = self._hashes.get(self.last_step)
        if before is not None and event.previous_hash not in before and not self._is_gap:
            detail = f"started from {event.previous_hash[:12]}, made before: {_short(before)}"
            self._breaches.add(BreachKind.HASH_CHAIN, name, detail)
        if self.bound is None:
            detail = f"no claim before it names trainer.max_staleness (epoch {event.epoch})"
            self._breaches.add(BreachKind.NO_BOUND, name, detail)
        self.last_step = event.step
        self._number(name, event.policy_version)
        self._is_gap = False
        self._hashes[event.step] = {event.weight_hash}
        self._hashes.pop(event.step - 2, None)
        self._record(event.closed)
        self.positions = {p.partition: p.offset for p in event.positions if p.topic == SCORED.name}
        self.steps[event.step] = Trained(event.policy_version - 1, self.bound)
        self._samples(event)

    def _number(self, name: str, version: int) -> None:
        """Versions are numbered without gaps: staleness is counted in them."""
        if self.policy_version >= 0 and version != self.policy_version + 1 and not self._is_gap:
            detail = f"made version {version}, the one before is {self.policy_version}"
            self._breaches.add(BreachKind.VERSION_CHAIN, name, detail)
        self.policy_version = version

    def _samples(self, event: StepCompleted) -> None:
        self.num_masked += len(event.masked)
        groups = {
            name: self._close(name, last, event.step)
            for name, last in _largest(event.samples).items()
        }
        for absent in event.absent:
            number = groups.get(absent.group_id)
            if number is not None:
                self.absent[number, absent.sample] = absent.reason
        self._train(event.samples, groups, event.step)
        for segment in event.masked:
            number = groups.get(segment.group_id)
            if number is not None:
                key = (number, segment.sample)
                self.masked[key] = self.masked.get(key, frozenset()) | {segment.segment}

    def _train(
        self, refs: Sequence[SampleRef], groups: Mapping[str, int | None], step: int
    ) -> None:
        """Note the samples of these groups (None: one that cannot be trained).

        Siblings mostly are neighbours, of one partition.
        """
        table, add_fresh = self._table, self.fresh.append
        flags, used_at, oldest = table.flags, table.used_at, table.oldest
        group, first, room = "", 0, 0
        partition = base = NOWHERE  # the place of the partition's offset 0
        for ref in refs:
            if ref.group_id != group:
                group, first, room = ref.group_id, 0, 0
                number = groups[group]
                if number is not None:
                    first, room = table.first[number], table.room[number]
            if ref.partition != partition:
                partition = ref.partition
                base = place_of(partition, 0)
            sample, offset, version = ref.sample, ref.offset, ref.oldest_policy_version
            if not 0 <= sample < room or (flag := flags[first + sample]) & TRAINED:
                if groups[group] is not None:
                    self._not_trained(ref, step, is_twice=0 <= sample < room)
                continue
            slot = first + sample
            flags[slot] = flag | TRAINED
            used_at[slot] = place = NOWHERE if offset >> OFFSET_BITS else base | offset
            in_32_bits = -_INT32 <= version <= _INT32
            oldest[slot] = version if in_32_bits else max(-_INT32, min(version, _INT32))
            add_fresh(place)

    def _not_trained(self, ref: SampleRef, step: int, *, is_twice: bool) -> None:
        name = f"{ref.group_id}/{ref.sample}"
        if is_twice:
            self.num_trained_twice += 1
            self._breaches.add(BreachKind.TRAINED_TWICE, name, f"again in step {step}")
        else:
            self._breaches.add(BreachKind.BAD_ID, name, f"trained in step {step}")

    def _close(self, group_id: str, last_sample: int, step: int) -> int | None:
        number = self._known(group_id, f"trained in step {step}", last_sample)
        if number is None:
            return None
        closed = self._table.closed[number]
        if closed > 0:
            detail = f"in step {closed} and in step {step}"
            self._breaches.add(BreachKind.CLOSED_TWICE, group_id, detail)
            return number
        if closed < 0:
            detail = f"dropped ({self.reasons[-1 - closed]}), then trained in step {step}"
            self._breaches.add(BreachKind.TRAINED_AND_DROPPED, group_id, detail)
        self._table.closed[number] = step
        return number

    def _drop(self, group: DroppedGroup) -> None:
        number = self._known(group.group_id, f"dropped ({group.reason})")
        if number is None:
            return
        closed = self._table.closed[number]
        if closed > 0:
            detail = f"trained in step {closed}, then dropped ({group.reason})"
            self._breaches.add(BreachKind.TRAINED_AND_DROPPED, group.group_id, detail)
        elif closed < 0:
            detail = f"dropped ({self.reasons[-1 - closed]}), then again ({group.reason})"
            self._breaches.add(BreachKind.CLOSED_TWICE, group.group_id, detail)
        else:
            reason = self._reasons.setdefault(group.reason, len(self._reasons))
            self._table.closed[number] = -1 - reason

    def _known(self, group_id: str, detail: str, last_sample: int = -1) -> int | None:
        """The table's number of a training group; a breach for any other id."""
        key = group_key(group_id.encode())
        if key is None or key < 0:
            name = group_id if key is None else group_name(key)
            self._breaches.add(BreachKind.BAD_ID, name, f"not a training group, yet {detail}")
            return None
        return self._table.group(key, last_sample if last_sample < MAX_SAMPLES else -1, 0)


def _largest(refs: Sequence[SampleRef]) -> dict[str, int]:
    """The largest sample number of each group, -1 at least; groups in the order of `refs`."""
    largest: dict[str, int] = {}
    group: str | None = None
    last = -1
    for ref in refs:
        if ref.group_id != group:
            group = ref.group_id
            last = largest.setdefault(group, -1)
        if ref.sample > last:
            last = largest[ref.group_id] = ref.sample
    return largest


def _bound(config: str) -> int | None:
    try:
        return int(json.loads(config)["trainer"]["max_staleness"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _short(hashes: set[str]) -> str:
    return ", ".join(sorted(text[:12] for text in hashes))
