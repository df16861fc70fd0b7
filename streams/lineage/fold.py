"""The lineage of one sample: prompt, attempts, scores, the step it was in, who used the result.

A fold over all topics of a run: `apply` takes records in any order between topics, `lineage` is
what is known of a sample by then. Only the samples that were asked for are kept, so the memory does
not grow with the run.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from rlstreams.schemas.events import (
    EVALUATE,
    NO_VERSION,
    DeadLetter,
    DroppedGroup,
    Event,
    GroupsDropped,
    PolicyLoaded,
    PolicyPublished,
    Prompt,
    SampleRef,
    ScoredTrajectory,
    StepCompleted,
    Trajectory,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.record import Position, Record

_SAMPLE = re.compile(r"(?P<group>\d+|e\d+-\d+)/(?P<sample>\d+)")
_GROUP = re.compile(r"\d+|e\d+-\d+")


class SampleId(NamedTuple):
    """Who a sample is; written `GROUP/SAMPLE`."""

    group_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.group_id}/{self.sample}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `12/3` or `e40-7/0`.

        Raises:
            ValueError: text of another form.
        """
        match = _SAMPLE.fullmatch(text)
        if match is None:
            raise ValueError(f"a sample is written GROUP/SAMPLE, as 12/3 or e40-7/0, got {text!r}")
        return cls(match["group"], int(match["sample"]))


def is_group(text: str) -> bool:
    """Whether `text` can be the id of a group: `12`, or `e40-7` of an evaluation."""
    return _GROUP.fullmatch(text) is not None


class Outcome(StrEnum):
    """What became of a sample."""

    UNKNOWN = "unknown"  # no topic speaks of it
    ISSUED = "issued"  # waits for a rollout worker, or is being sampled
    ROLLED_OUT = "rolled out"  # waits for its scores
    SCORED = "scored"  # waits for the trainer
    EVALUATED = "evaluated"
    TRAINED = "trained"
    ABSENT = "left out"  # its group was trained without it
    DROPPED = "dropped"
    DEAD = "dead-lettered"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedIn:
    """The step that used a sample, and its place there."""

    step: StepCompleted  # of its samples, masked and absent ones only this group's are kept
    position: Position
    ref: SampleRef
    index: int  # in the batch, from 0
    micro_batch: int  # from 0
    num_samples: int  # in the batch
    masked: Mapping[int, int]  # segment: staleness, of those that were left out of the loss

    @property
    def base_version(self) -> int:
        """The version that was trained: staleness counts from it."""
        return self.step.policy_version - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The group closed without being trained."""

    group: DroppedGroup
    position: Position
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """One sample from prompt to policy; of each topic its first record counts."""

    sample: SampleId
    prompt: Record[Prompt] | None = None
    trajectory: Record[Trajectory] | None = None
    scored: Record[ScoredTrajectory] | None = None
    copies: tuple[Position, ...] = ()  # later records of the same sample: nobody uses them
    letters: tuple[Record[DeadLetter], ...] = ()
    trained: TrainedIn | None = None
    absent: str = ""  # why the group's step left the sample out
    dropped: Drop | None = None
    replaced_by: str = ""  # the group issued in this one's place
    loads: Mapping[str, PolicyLoaded] = field(default_factory=dict)  # that its tokens name, by id
    published: Mapping[int, PolicyPublished] = field(default_factory=dict)  # versions it touches
    used_by: tuple[PolicyLoaded, ...] = ()  # first load of the version it helped make, by worker

    @property
    def rollout(self) -> Trajectory | None:
        """The trajectory; where its own record is gone, the one that the scores carry."""
        if self.trajectory is not None:
            return self.trajectory.event
        return self.scored.event.trajectory if self.scored is not None else None

    @property
    def missing(self) -> tuple[str, ...]:
        """What its records speak of and the log does not have: removed, or not recorded."""
        found = ["its prompt"] if self.prompt is None and self.rollout is not None else []
        if self.trajectory is None and self.scored is not None:
            found.append("its trajectory")
        names, versions = _touched(self)
        found += [f"load {name}" for name in sorted(names - self.loads.keys() - {""})]
        if self.trained is not None:
            versions.add(self.trained.step.policy_version)
        unknown = sorted(versions - self.published.keys() - {NO_VERSION})
        return (*found, *(f"the announcement of version {version}" for version in unknown))

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        if self.trained is not None:
            return Outcome.TRAINED
        if self.absent:
            return Outcome.ABSENT
        if self._is_dead:
            return Outcome.DEAD
        if self.dropped is not None:
            return Outcome.DROPPED
        return self._on_its_way

    @property
    def _is_dead(self) -> bool:
        """A letter ends a sample, but not one about a copy of what was scored."""
        first = None if self.scored is None else self.scored.position
        letters = (letter.event for letter in self.letters)
        return any(
            first is None or first == (x.origin_topic, x.origin_partition, x.origin_offset)
            for x in letters
        )

    @property
    def _on_its_way(self) -> Outcome:
        rollout = self.rollout
        if rollout is not None and rollout.purpose == EVALUATE:
            return Outcome.EVALUATED
        if self.scored is not None:
            return Outcome.SCORED
        if rollout is not None:
            return Outcome.ROLLED_OUT
        return Outcome.UNKNOWN if self.prompt is None else Outcome.ISSUED


class LineageFold:
    """Keeps what is said of the given samples.

    Args:
        samples: whose lineage is wanted.
        groups: groups of which every sample is wanted, however many there are.
    """

    def __init__(self, samples: Collection[SampleId], groups: Collection[str] = ()) -> None:
        self._lineages = {sample: Lineage(sample=sample) for sample in samples}
        self._groups = frozenset(groups)
        self._keys = self._groups | {sample.group_id for sample in samples}
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._drop)
        self._firsts: defaultdict[type[Event], FirstRecords] = defaultdict(FirstRecords)
        self._trained: dict[SampleId, TrainedIn] = {}
        self._absent: dict[SampleId, str] = {}
        self._drops: dict[str, Drop] = {}
        self._replaced_by: dict[str, str] = {}
        self._loads: dict[str, PolicyLoaded] = {}
        self._published: dict[int, PolicyPublished] = {}

    @property
    def groups(self) -> frozenset[str]:
        """Groups whose records it needs of the topics that are keyed by group."""
        return self._keys

    @property
    def dropped_groups(self) -> frozenset[str]:
        """Of its groups those that closed untrained: another group's prompt may name them."""
        return frozenset(self._drops)

    def apply(self, record: Record[Event]) -> None:
        """Take one record; of other samples it is passed by."""
        event = record.event
        if isinstance(event, Prompt) and event.replaces in self._keys:
            self._replaced_by.setdefault(event.replaces or "", event.group_id)
        if isinstance(event, Prompt | Trajectory | DeadLetter):
            self._about(SampleId(event.group_id, event.sample), record)
        elif isinstance(event, ScoredTrajectory):
            self._about(SampleId(event.trajectory.group_id, event.trajectory.sample), record)
        elif isinstance(event, PolicyLoaded):
            self._loads.setdefault(event.load_id, event)
        elif isinstance(event, PolicyPublished):
            self._published.setdefault(event.policy_version, event)
        else:
            self._ledger.apply(event, record.position)

    def lineages(self) -> list[Lineage]:
        """Those that were asked for, in that order; then the others of whole groups."""
        return [self._woven(lineage) for lineage in self._lineages.values()]

    def _is_wanted(self, sample: SampleId) -> bool:
        return sample in self._lineages or sample.group_id in self._groups

    def _about(self, sample: SampleId, record: Record[Event]) -> None:
        if self._is_wanted(sample):
            known = self._lineages.get(sample, Lineage(sample=sample))
            is_copy = not self._firsts[type(record.event)].admits(record.event)
            self._lineages[sample] = _with(known, record, is_copy=is_copy)

    def _drop(self, event: GroupsDropped, position: Position) -> None:
        for group in event.groups:
            if group.group_id in self._keys:
                drop = Drop(group=group, position=position, at_ms=event.dropped_at_ms)
                self._drops.setdefault(group.group_id, drop)

    def _step(self, event: StepCompleted, position: Position) -> None:
        for index, ref in enumerate(event.samples):
            if ref.group_id in self._keys:
                trained = _trained(event, position, ref, index)
                self._trained[SampleId(ref.group_id, ref.sample)] = trained
        for absent in event.absent:
            if absent.group_id in self._keys:
                self._absent[SampleId(absent.group_id, absent.sample)] = absent.reason

    def _woven(self, lineage: Lineage) -> Lineage:
        """With what became of it, and the weights that it was made with and helped to make."""
        sample, group_id = lineage.sample, lineage.sample.group_id
        trained = self._trained.get(sample)
        names, versions = _touched(lineage)
        used: dict[str, PolicyLoaded] = {}
        if trained is not None:
            made = trained.step.policy_version
            versions.add(made)
            for load in self._loads.values():
                if load.policy_version == made:
                    used.setdefault(load.worker, load)
        return dataclasses.replace(
            lineage,
            trained=trained,
            absent=self._absent.get(sample, ""),
            dropped=self._drops.get(group_id),
            replaced_by=self._replaced_by.get(group_id, ""),
            loads={name: self._loads[name] for name in sorted(names) if name in self._loads},
            published={v: self._published[v] for v in sorted(versions) if v in self._published},
            used_by=tuple(sorted(used.values(), key=lambda load: load.loaded_at_ms)),
        )


def _with(known: Lineage, record: Record[Event], *, is_copy: bool) -> Lineage:
    """`known` and one more record about the same sample."""
    event, raw = record.event, record.raw
    if isinstance(event, DeadLetter):
        letter = Record(event=event, raw=raw)
        return dataclasses.replace(known, letters=(*known.letters, letter))
    if is_copy:
        return dataclasses.replace(known, copies=(*known.copies, record.position))
    name = {Prompt: "prompt", Trajectory: "trajectory"}.get(type(event), "scored")
    changed: Lineage = dataclasses.replace(known, **{name: record})  # type: ignore[arg-type]
    return changed


def _trained(event: StepCompleted, position: Position, ref: SampleRef, index: int) -> TrainedIn:
    group = ref.group_id
    ends = list(itertools.accumulate(event.micro_batches))
    own = dataclasses.replace(
        event,
        samples=tuple(other for other in event.samples if other.group_id == group),
        masked=tuple(other for other in event.masked if other.group_id == group),
        absent=tuple(other for other in event.absent if other.group_id == group),
    )
    return TrainedIn(
        step=own,
        position=position,
        ref=ref,
        index=index,
        micro_batch=bisect.bisect_right(ends, event.order.index(index) if event.order else index),
        num_samples=len(event.samples),
        masked={m.segment: m.staleness for m in own.masked if m.sample == ref.sample},
    )


def _touched(lineage: Lineage) -> tuple[set[str], set[int]]:
    """Load ids and versions that a sample's tokens and scores name."""
    names: set[str] = set()
    versions: set[int] = set()
    if (rollout := lineage.rollout) is not None:
        sampled = [segment for segment in rollout.segments if segment.author == "policy"]
        names |= {segment.load_id for segment in sampled}
        versions |= {segment.policy_version for segment in sampled}
    if lineage.scored is not None:
        names |= {score.load_id for score in lineage.scored.event.scores}
        versions |= {score.policy_version for score in lineage.scored.event.scores}
    return names, versions
