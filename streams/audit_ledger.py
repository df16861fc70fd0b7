"""The trainer's side of an audit: what `steps` says was trained, dropped and left out.

Folded before anything else, because a sample's fate is decided here: later records are held
against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.events import (
    ClosedGroups,
    Event,
    GroupsDropped,
    RedoDrifted,
    SampleRef,
    StepCompleted,
    TrainerStarted,
)
from streams.audit_report import Breaches, BreachKind
from streams.topics import SCORED
from streams.view_run import EpochGate


@dataclass(frozen=True, slots=True)
class Use:
    """One trained sample, until its scored record has been seen."""

    group_id: str
    sample: int
    step: int
    base_version: int  # the version that was trained on: staleness counts from it
    bound: int | None  # max_staleness in force
    oldest_version: int  # as the ledger says
    masked: frozenset[int]  # segments left out of the loss


class Ledger:
    """Folds `steps`. Of two events for one step the first counts; void epochs count for nothing."""

    def __init__(self, breaches: Breaches) -> None:
        self._breaches = breaches
        self._gate = EpochGate()
        self._closed = ClosedGroups(watermark=0)
        self._hashes: dict[int, set[str]] = {}  # by step: what the next one may start from
        self.run = ""
        self.bound: int | None = None
        self.last_step = 0
        self.policy_version = -1
        self.trained_step: dict[str, int] = {}  # by group
        self.trained_samples: dict[str, int] = {}  # by group: bit n is sample n
        self.dropped: dict[str, str] = {}  # by group: the reason
        self.absent: dict[str, dict[int, str]] = {}  # by group and sample: the reason
        self.uses: dict[tuple[int, int], Use] = {}  # by partition and offset of the scored record
        self.positions: Mapping[int, int] = {}  # of scored-trajectories, by partition
        self.num_trained_twice = 0
        self.num_masked = 0
        self.num_void = 0

    def apply(self, event: Event) -> None:
        """Take one event of `steps`."""
        if not self._gate.admits(event):
            self.num_void += 1
        elif isinstance(event, TrainerStarted):
            self.run = event.run
            self.bound = _bound(event.config)
        elif isinstance(event, StepCompleted):
            self._step(event)
        elif isinstance(event, GroupsDropped):
            self._drop(event)
        elif isinstance(event, RedoDrifted):
            self._hashes.setdefault(event.step, set()).add(event.actual_hash)
            self.policy_version = event.policy_version

    def is_trained(self, group_id: str, sample: int) -> bool:
        """Whether a step holds this sample."""
        return bool(self.trained_samples.get(group_id, 0) >> sample & 1)

    def is_open(self, group_id: str) -> bool:
        """Whether the group is neither trained nor dropped."""
        return group_id not in self.trained_step and group_id not in self.dropped

    def check_closed_set(self, breaches: Breaches) -> None:
        """Hold the newest recorded closed set against the groups that events closed."""
        closed = {int(g) for g in (*self.trained_step, *self.dropped) if g.isdecimal()}
        recorded = set(range(self._closed.watermark)) | set(self._closed.above)
        for number in sorted(closed ^ recorded):
            says = "no event closed it" if number in recorded else "the set leaves it out"
            breaches.add(BreachKind.CLOSED_SET, str(number), f"in the newest closed set: {says}")

    def _step(self, event: StepCompleted) -> None:
        name = f"step {event.step}"
        if event.step <= self.last_step:
            self._breaches.add(BreachKind.STEP_TWICE, name, f"again in epoch {event.epoch}")
            return
        if event.step != self.last_step + 1:
            detail = f"comes after step {self.last_step}" if self.last_step else "is the first one"
            self._breaches.add(BreachKind.STEP_MISSING, name, detail)
        before = self._hashes.get(self.last_step)
        if before is not None and event.previous_hash not in before:
            detail = f"started from {event.previous_hash[:12]}, made before: {_short(before)}"
            self._breaches.add(BreachKind.HASH_CHAIN, name, detail)
        if self.bound is None:
            detail = f"no claim before it names trainer.max_staleness (epoch {event.epoch})"
            self._breaches.add(BreachKind.NO_BOUND, name, detail)
        self.last_step = event.step
        self.policy_version = event.policy_version
        self._hashes[event.step] = {event.weight_hash}
        self._hashes.pop(event.step - 2, None)
        self._closed = event.closed
        self.positions = {p.partition: p.offset for p in event.positions if p.topic == SCORED.name}
        self._samples(event)

    def _samples(self, event: StepCompleted) -> None:
        masked: dict[tuple[str, int], set[int]] = {}
        for segment in event.masked:
            masked.setdefault((segment.group_id, segment.sample), set()).add(segment.segment)
        self.num_masked += len(event.masked)
        for absent in event.absent:
            self.absent.setdefault(absent.group_id, {})[absent.sample] = absent.reason
        for group_id in dict.fromkeys(ref.group_id for ref in event.samples):
            self._close(group_id, event.step)
        for ref in event.samples:
            hidden = frozenset(masked.get((ref.group_id, ref.sample), ()))
            self._sample(event, ref, hidden)

    def _sample(self, event: StepCompleted, ref: SampleRef, masked: frozenset[int]) -> None:
        name = f"{ref.group_id}/{ref.sample}"
        if self.is_trained(ref.group_id, ref.sample):
            self.num_trained_twice += 1
            self._breaches.add(BreachKind.TRAINED_TWICE, name, f"again in step {event.step}")
            return
        bits = self.trained_samples.get(ref.group_id, 0)
        self.trained_samples[ref.group_id] = bits | 1 << ref.sample
        self.uses[(ref.partition, ref.offset)] = Use(
            group_id=ref.group_id,
            sample=ref.sample,
            step=event.step,
            base_version=event.policy_version - 1,
            bound=self.bound,
            oldest_version=ref.oldest_policy_version,
            masked=masked,
        )

    def _close(self, group_id: str, step: int) -> None:
        if group_id in self.dropped:
            detail = f"dropped ({self.dropped[group_id]}), then trained in step {step}"
            self._breaches.add(BreachKind.TRAINED_AND_DROPPED, group_id, detail)
        if group_id in self.trained_step:
            detail = f"in step {self.trained_step[group_id]} and in step {step}"
            self._breaches.add(BreachKind.CLOSED_TWICE, group_id, detail)
        self.trained_step.setdefault(group_id, step)

    def _drop(self, event: GroupsDropped) -> None:
        self._closed = event.closed
        for group in event.groups:
            step = self.trained_step.get(group.group_id)
            if step is not None:
                detail = f"trained in step {step}, then dropped ({group.reason})"
                self._breaches.add(BreachKind.TRAINED_AND_DROPPED, group.group_id, detail)
            elif group.group_id in self.dropped:
                detail = f"dropped ({self.dropped[group.group_id]}), then again ({group.reason})"
                self._breaches.add(BreachKind.CLOSED_TWICE, group.group_id, detail)
            self.dropped.setdefault(group.group_id, group.reason)


def _bound(config: str) -> int | None:
    try:
        return int(json.loads(config)["trainer"]["max_staleness"])
    except (ValueError, KeyError, TypeError):
        return None


def _short(hashes: set[str]) -> str:
    return ", ".join(sorted(text[:12] for text in hashes))
