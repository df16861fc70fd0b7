"""The lineage of one sample: prompt, attempts, scores, its step, and the loads of its version.

A fold over all topics of a run: `apply` takes records in any order between topics, `lineages`
returns the samples' records read so far. Only the requested samples are kept, so the memory does
not grow with the run.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rlstreams.schemas.events import (
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
    StepsRedone,
    TrainerStarted,
    Trajectory,
)
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.log.record import Position, Record
from rlstreams.streams.samples.fold import ALL, Samples
from rlstreams.streams.samples.life import Outcome
from rlstreams.streams.segments import sampled_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedIn:
    """The step that used a sample, and its place there."""

    step: StepCompleted
    position: Position
    ref: SampleRef
    index: int  # in the batch, from 0
    micro_batch: int  # from 0
    masked: Mapping[int, int]  # staleness by segment, of segments left out of the loss

    @property
    def base_version(self) -> int:
        """The version that the step trained: staleness counts from it."""
        return self.step.policy_version - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The step that made a version."""

    step: int  # 0: the model that the run began with
    weight_hash: str  # as the ledger has it; "": not in this log
    position: str = ""  # of the step in `steps`


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The drop that closed a group without training it."""

    group: DroppedGroup
    position: Position
    at_ms: int


@dataclass(slots=True, kw_only=True)
class Lineage:
    """One sample from prompt to policy; its first record in each topic counts."""

    sample: SampleId
    outcome: Outcome = Outcome.UNKNOWN
    after: str = str(Outcome.UNKNOWN)  # the outcome with its step or reason
    prompt: Record[Prompt] | None = None
    trajectory: Record[Trajectory] | None = None
    scored: Record[ScoredTrajectory] | None = None
    copies: tuple[Position, ...] = ()  # later records of the same sample, which nobody uses
    letters: tuple[Record[DeadLetter], ...] = ()
    trained: TrainedIn | None = None
    dropped: Drop | None = None
    replaced_by: str = ""  # the group issued in this one's place
    loads: Mapping[str, PolicyLoaded] = field(default_factory=dict)  # named by its tokens, by id
    published: Mapping[int, PolicyPublished] = field(default_factory=dict)  # versions it touches
    made: Mapping[int, Made] = field(default_factory=dict)  # versions it touches
    claim: TrainerStarted | None = None  # in force when it was sampled
    redone: tuple[StepsRedone, ...] = ()  # redos of the step that trained it
    used_by: tuple[PolicyLoaded, ...] = ()  # first load of the version it helped make, by worker

    @property
    def rollout(self) -> Trajectory | None:
        """The trajectory; where its record is gone, the trajectory that the scores carry."""
        if self.trajectory is not None:
            return self.trajectory.event
        return self.scored.event.trajectory if self.scored is not None else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Records that the sample's records name and the log lacks: removed, or not recorded."""
        found = ["its prompt"] if self.prompt is None and self.rollout is not None else []
        if self.trajectory is None and self.scored is not None:
            found.append("its trajectory")
        names, versions = _touched(self)
        found += [f"load {name}" for name in sorted(names - self.loads.keys() - {""})]
        if self.trained is not None:
            versions.add(self.trained.step.policy_version)
        unknown = sorted(versions - self.published.keys() - {NO_VERSION})
        return (*found, *(f"the announcement of version {version}" for version in unknown))


class LineageFold:
    """Keeps the records of the given samples.

    Args:
        samples: samples whose lineage is wanted.
        groups: groups whose every sample is wanted.
    """

    def __init__(self, samples: Collection[SampleId], groups: Collection[str] = ()) -> None:
        self._lineages = {sample: Lineage(sample=sample) for sample in samples}
        self._whole = frozenset(groups)
        self.groups = self._whole | {sample.group_id for sample in samples}
        """Groups whose records it needs from topics that are keyed by group."""
        self._folded = Samples(keeps=ALL, wants=self.groups)
        ledger = self._folded.ledger
        ledger.listen(on_step=self._step, on_drop=self._drop, on_redone=self._redone)
        self._drops: dict[str, Drop] = {}
        self._loads: dict[str, PolicyLoaded] = {}
        self._published: dict[int, PolicyPublished] = {}
        self._redos: list[StepsRedone] = []

    @property
    def dropped_groups(self) -> frozenset[str]:
        """Its groups that closed untrained: another group's prompt may name them in `replaces`."""
        return frozenset(self._drops)

    def apply(self, record: Record[Event]) -> None:
        """Take one record; a record of another sample changes nothing."""
        event = record.event
        counts = self._folded.apply(event, record.position)
        if isinstance(event, PolicyLoaded):
            self._loads.setdefault(event.load_id, event)
        elif isinstance(event, PolicyPublished):
            self._published.setdefault(event.policy_version, event)
        elif isinstance(event, Prompt | Trajectory | ScoredTrajectory | DeadLetter):
            stage = event.trajectory if isinstance(event, ScoredTrajectory) else event
            if found := self._wanted(stage.group_id, stage.sample):
                _add(found, record, counts=counts)

    def lineages(self) -> list[Lineage]:
        """Return the requested samples in their order, then the others of whole groups."""
        for lineage in self._lineages.values():
            self._weave(lineage)
        return [*self._lineages.values()]

    def _wanted(self, group_id: str, number: int) -> Lineage | None:
        sample = SampleId(group_id, number)
        if group_id in self._whole:
            self._lineages.setdefault(sample, Lineage(sample=sample))
        return self._lineages.get(sample)

    def _drop(self, event: GroupsDropped, position: Position) -> None:
        for group in event.groups:
            if group.group_id in self.groups:
                drop = Drop(group=group, position=position, at_ms=event.dropped_at_ms)
                self._drops.setdefault(group.group_id, drop)

    def _step(self, event: StepCompleted, position: Position) -> None:
        for index, ref in enumerate(event.samples):
            if found := self._wanted(ref.group_id, ref.sample):
                found.trained = _trained(event, position, ref, index)
        for absent in event.absent:
            self._wanted(absent.group_id, absent.sample)

    def _redone(self, event: StepsRedone, _: Position) -> None:
        self._redos.append(event)

    def _made(self, version: int) -> Made | None:
        ledger = self._folded.ledger
        if (step := ledger.made_by.get(version)) is None:
            return None
        fact = ledger.steps.get(step)
        return Made(
            step=step,
            weight_hash=ledger.hashes.get(version, ""),
            position="" if fact is None else str(fact.position),
        )

    def _weave(self, lineage: Lineage) -> None:
        """Add a sample's outcome, its weights, and the version that it helped to make."""
        lineage.dropped = self._drops.get(lineage.sample.group_id)
        if (group := self._folded.group(lineage.sample.group_id)) is not None:
            lineage.replaced_by = group.replaced_by
        if (folded := self._folded.get(*lineage.sample)) is not None:
            lineage.outcome, lineage.after = folded.outcome, folded.after
        names, versions = _touched(lineage)
        if lineage.trained is not None:
            made = lineage.trained.step.policy_version
            versions.add(made)
            loads = sorted(self._loads.values(), key=lambda load: load.loaded_at_ms)
            firsts = {load.worker: load for load in reversed(loads) if load.policy_version == made}
            lineage.used_by = tuple(reversed(firsts.values()))
        by = {version: self._made(version) for version in versions}
        lineage.made = {version: one for version, one in by.items() if one is not None}
        if (rollout := lineage.rollout) is not None:
            claims = self._folded.ledger.claims.values()
            known = [c for c in claims if c.started_at_ms <= rollout.finished_at_ms]
            lineage.claim = known[-1] if known else None
        if (trained := lineage.trained) is not None:
            number = trained.step.step
            lineage.redone = tuple(
                one for one in self._redos if one.first_step <= number <= one.last_step
            )
        lineage.loads = {name: self._loads[name] for name in sorted(names & self._loads.keys())}
        lineage.published = {
            v: self._published[v] for v in sorted(versions & self._published.keys())
        }


def _add(known: Lineage, record: Record[Event], *, counts: bool) -> None:
    """Add a record about the sample: every dead letter, and of other kinds the one that counts."""
    event, raw = record.event, record.raw
    if isinstance(event, DeadLetter):
        known.letters += (Record(event=event, raw=raw),)
    elif not counts:
        known.copies += (record.position,)
    elif isinstance(event, Prompt):
        known.prompt = Record(event=event, raw=raw)
    elif isinstance(event, Trajectory):
        known.trajectory = Record(event=event, raw=raw)
    elif isinstance(event, ScoredTrajectory):
        known.scored = Record(event=event, raw=raw)


def _trained(event: StepCompleted, position: Position, ref: SampleRef, index: int) -> TrainedIn:
    ends = list(itertools.accumulate(event.micro_batches))
    first = sum(event.rows[:index]) if event.rows else index  # of its rows
    key = ref.group_id, ref.sample
    return TrainedIn(
        step=event,
        position=position,
        ref=ref,
        index=index,
        micro_batch=bisect.bisect_right(ends, event.order.index(first) if event.order else first),
        masked={m.segment: m.staleness for m in event.masked if (m.group_id, m.sample) == key},
    )


def _touched(lineage: Lineage) -> tuple[set[str], set[int]]:
    """Return load ids and versions that a sample's tokens and scores name."""
    names: set[str] = set()
    versions: set[int] = set()
    if (rollout := lineage.rollout) is not None:
        sampled = sampled_segments(rollout)
        names |= {segment.load_id for segment in sampled}
        versions |= {segment.policy_version for segment in sampled}
    if lineage.scored is not None:
        names |= {score.load_id for score in lineage.scored.event.scores}
        versions |= {score.policy_version for score in lineage.scored.event.scores}
    return names, versions
