"""The audit's own fold of `steps`: samples trained, dropped, left out and redone.

Of two events for one step the first counts; events of a fenced epoch are void and count for
nothing. With the trainer's fold it shares only the rule of epochs, for it checks that fold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlstreams.schemas.events import (
    ClosedGroups,
    DroppedGroup,
    Event,
    GroupsDropped,
    RedoDrifted,
    RunBranched,
    SampleRef,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.samples import AuditGroup, AuditSample, AuditSamples
from rlstreams.streams.log.fencing import EpochGate
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.record import Position, place_of
from rlstreams.streams.log.topics import SCORED


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """A record of `steps` that cannot be read, and may be a step; in place of an event."""

    detail: str  # its schema's fingerprint, and the error


class TrainedUnder(NamedTuple):
    """Version and staleness bound that the samples of one step were trained under."""

    base_version: int  # staleness counts from it
    bound: int | None  # max_staleness in force


class AuditLedger:
    """Folds `steps` into `samples`."""

    def __init__(self, samples: AuditSamples, breaches: Breaches) -> None:
        self._samples = samples
        self._breaches = breaches
        self._gate = EpochGate()
        self._recorded = ClosedGroups(watermark=0)  # the closed set of the newest event
        self._hashes: set[str] = set()  # of the last step: weights that the next may start from
        self.branch: RunBranched | None = None  # its parent's closed groups are closed here too
        self._inherited = ClosedGroups(watermark=0)
        self.run = ""
        self.bound: int | None = None
        self.trainer_state = ""  # of the newest heartbeat
        self.last_step = 0
        self.policy_version = -1
        self.steps: dict[int, TrainedUnder] = {}
        self.masked: dict[tuple[str, int], set[int]] = {}  # segments by group and sample
        self.absent: dict[tuple[str, int], str] = {}  # likewise: the reason for its absence
        self.positions: Mapping[int, int] = {}  # of scored-trajectories, by partition
        self.fresh: list[AuditSample] = []  # trained since this was last emptied
        self.redone: list[StepsRedone] = []
        self.num_drifted = 0
        self.num_trained_twice = 0
        self.num_masked = 0
        self.void: list[Position] = []
        self.disowned: set[int] = set()  # offsets that heartbeats name, before these are folded
        self._num_unread = 0
        self._is_unread_newest = False  # no closed set was read behind an unreadable record
        self._is_gap = False  # an unreadable record lies behind the newest step

    def apply(self, event: Event | UnreadStep, position: Position) -> None:
        """Take one event of `steps`."""
        if isinstance(event, UnreadStep):
            self._num_unread += 1
            self._is_unread_newest = self._is_gap = True
            self._breaches.add(BreachKind.UNREADABLE_STEP, str(position), event.detail)
        elif not self._gate.admits(event) or (isinstance(event, RunBranched) and self._has_begun):
            self.void.append(position)
        elif position.offset in self.disowned:
            self._forged(event, position)
        elif isinstance(event, StepCompleted):
            self._step(event)
        elif isinstance(event, TrainerHeartbeat):
            self.trainer_state = event.state
        elif isinstance(event, GroupsDropped):
            self._record(event.closed)
            for group in event.groups:
                self._drop(group)
        elif isinstance(event, TrainerStarted):
            self.run, self.bound, self.trainer_state = event.run, _bound(event.config), ""
            if self.policy_version < 0:
                self.policy_version = event.policy_version
        elif isinstance(event, RedoDrifted):
            self._drift(event)
        elif isinstance(event, StepsRedone):
            self.redone.append(event)
        elif isinstance(event, RunBranched):
            self._begin(event)

    def _drift(self, event: RedoDrifted) -> None:
        self.num_drifted += 1
        if event.step == self.last_step:
            self._hashes.add(event.actual_hash)
        self._number(f"redo of step {event.step}", event.policy_version)

    @property
    def _has_begun(self) -> bool:
        return bool(self._gate.newest is not None or self.branch or self.last_step)

    def _begin(self, event: RunBranched) -> None:
        self.branch, self._inherited = event, event.closed
        self.last_step, self.policy_version = event.step, event.policy_version
        self._hashes = {event.weight_hash}
        self._record(event.closed)

    def is_inherited(self, number: int) -> bool:
        """Whether the parent of a branch closed this group."""
        return number < self._inherited.watermark or number in self._inherited.above

    def add_gaps(
        self, breaches: Breaches, kind: BreachKind, present: set[int], end: int, detail: str
    ) -> None:
        """Note each number below `end` that is neither `present` nor inherited."""
        known = present | {n for n in self._inherited.above if n < end}
        breaches.add_gaps(kind, known, self._inherited.watermark, end, detail)

    def foresee(self, event: Event) -> None:
        """Note, ahead of the fold, the offsets of events that trainers disown."""
        if isinstance(event, TrainerHeartbeat):
            self.disowned.update(event.disowned)

    def _forged(self, event: Event, position: Position) -> None:
        """Add a disowned event's breach; of a disowned step, take its number and version alone."""
        name, detail = str(position), f"its trainer did not write this {type(event).__name__}"
        self._breaches.add(BreachKind.FORGED_STEP, name, detail)
        if isinstance(event, StepCompleted) and event.step == self.last_step + 1:
            self.last_step = event.step
            self._number(f"step {event.step}", event.policy_version)
            self._hashes.add(event.weight_hash)

    def may_be_closed(self, number: int) -> bool:
        """Whether an unreadable record may have closed a group that no event closed.

        A group that a closed set behind that record leaves out is open.
        """
        if not self._num_unread:
            return False
        recorded = self._recorded
        is_recorded = number < recorded.watermark or number in recorded.above
        return is_recorded or self._is_unread_newest

    def check_closed_set(self, breaches: Breaches) -> None:
        """Hold the newest recorded closed set against the groups that events closed.

        If a record cannot be read, it may have closed groups of the set that no event closed.
        """
        groups = self._samples.groups.values()
        closed = {g.number for g in groups if g.number is not None and not g.is_open}
        closed |= set(self._inherited.above)
        watermark, recorded = self._recorded.watermark, set(self._recorded.above)
        above = {number for number in closed if number >= watermark}
        kind, where = BreachKind.CLOSED_SET, "in the newest closed set: "
        for number in sorted(above - recorded):
            breaches.add(kind, str(number), f"{where}the set leaves it out")
        if not self._num_unread:
            for number in sorted(recorded - above):
                breaches.add(kind, str(number), f"{where}no event closed it")
            self.add_gaps(breaches, kind, closed, watermark, f"{where}no event closed it")

    def _record(self, closed: ClosedGroups) -> None:
        self._recorded = closed
        self._is_unread_newest = False

    def _step(self, event: StepCompleted) -> None:
        name, add = f"step {event.step}", self._breaches.add
        if event.step <= self.last_step:
            add(BreachKind.STEP_TWICE, name, f"again in epoch {event.epoch}")
            return
        if event.step != self.last_step + 1 and not self._is_gap:
            detail = f"comes after step {self.last_step}" if self.last_step else "is the first one"
            add(BreachKind.STEP_MISSING, name, detail)
        if self.last_step and event.previous_hash not in self._hashes and not self._is_gap:
            made = ", ".join(sorted(text[:12] for text in self._hashes))
            detail = f"started from {event.previous_hash[:12]}, made before: {made}"
            add(BreachKind.HASH_CHAIN, name, detail)
        if self.bound is None:
            detail = f"no claim before it names trainer.max_staleness (epoch {event.epoch})"
            add(BreachKind.NO_BOUND, name, detail)
        self.last_step = event.step
        self._number(name, event.policy_version)
        self._is_gap = False
        self._hashes = {event.weight_hash}
        self._record(event.closed)
        self.positions = {p.partition: p.offset for p in event.positions if p.topic == SCORED.name}
        self.steps[event.step] = TrainedUnder(event.policy_version - 1, self.bound)
        self._take_samples(event)

    def _number(self, name: str, version: int) -> None:
        """Check that versions are numbered without gaps: staleness is counted in them."""
        if self.policy_version >= 0 and version != self.policy_version + 1 and not self._is_gap:
            detail = f"made version {version}, the one before is {self.policy_version}"
            self._breaches.add(BreachKind.VERSION_CHAIN, name, detail)
        self.policy_version = version

    def _take_samples(self, event: StepCompleted) -> None:
        groups: dict[str, AuditGroup | None] = {}
        for ref in event.samples:
            if ref.group_id not in groups:
                groups[ref.group_id] = self._close(ref.group_id, event.step)
            group = groups[ref.group_id]
            if group is not None:
                self._train(ref, group, event.step)
        for absent in event.absent:
            if groups.get(absent.group_id) is not None:
                self.absent[absent.group_id, absent.sample] = absent.reason
        for masked in event.masked:
            self.num_masked += 1
            if groups.get(masked.group_id) is not None:
                key = masked.group_id, masked.sample
                self.masked.setdefault(key, set()).add(masked.segment)

    def _train(self, ref: SampleRef, group: AuditGroup, step: int) -> None:
        sample, name = group.sample(ref.sample), sample_name(ref)
        if sample is None:
            self._breaches.add(BreachKind.BAD_ID, name, f"trained in step {step}")
        elif sample.used is not None:
            self.num_trained_twice += 1
            self._breaches.add(BreachKind.TRAINED_TWICE, name, f"again in step {step}")
        else:
            sample.used = place_of(ref.partition, ref.offset)
            sample.oldest = ref.oldest_policy_version
            self.fresh.append(sample)

    def _close(self, group_id: str, step: int) -> AuditGroup | None:
        group = self._training_group(group_id, f"trained in step {step}")
        if group is None:
            return None
        if group.step:
            detail = f"in step {group.step} and in step {step}"
            self._breaches.add(BreachKind.CLOSED_TWICE, group_id, detail)
            return group
        if group.dropped is not None:
            detail = f"dropped ({group.dropped}), then trained in step {step}"
            self._breaches.add(BreachKind.TRAINED_AND_DROPPED, group_id, detail)
        group.step = step
        return group

    def _drop(self, dropped: DroppedGroup) -> None:
        group_id, reason = dropped.group_id, dropped.reason
        group = self._training_group(group_id, f"dropped ({reason})")
        if group is None:
            return
        if group.step:
            detail = f"trained in step {group.step}, then dropped ({reason})"
            self._breaches.add(BreachKind.TRAINED_AND_DROPPED, group_id, detail)
        elif group.dropped is not None:
            detail = f"dropped ({group.dropped}), then again ({reason})"
            self._breaches.add(BreachKind.CLOSED_TWICE, group_id, detail)
        else:
            group.dropped = reason

    def _training_group(self, group_id: str, detail: str) -> AuditGroup | None:
        group = self._samples.group(group_id)
        if group is None or group.number is None:
            self._breaches.add(BreachKind.BAD_ID, group_id, f"not a training group, yet {detail}")
            return None
        if self.is_inherited(group.number):
            detail = f"by the parent of this branch, then {detail}"
            self._breaches.add(BreachKind.CLOSED_TWICE, group_id, detail)
        return group


def _bound(config: str) -> int | None:
    try:
        return int(json.loads(config)["trainer"]["max_staleness"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
