"""The run as its ledger tells it: claims, steps, versions, closed groups, drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rlstreams.schemas.events import (
    ClosedGroups,
    Event,
    GroupsDropped,
    PolicyPublished,
    RedoDrifted,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.streams.log.fencing import StepsGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A trainer took the run over."""

    epoch: int
    instance: str
    next_step: int
    step_target: int
    policy_version: int
    weight_hash: str
    config: str  # JSON, resolved
    started_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """What one step says of itself, without its samples' ids."""

    step: int
    epoch: int
    policy_version: int
    reward: float  # mean over the batch
    loss: float
    num_samples: int
    num_tokens: int  # prompts included
    num_masked: int  # segments
    metrics: Mapping[str, float]
    staleness: Mapping[int, int]  # trained tokens by versions of distance
    anchors: Mapping[str, int]  # trained tokens by anchor
    started_at_ms: int
    finished_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run up to its newest record. All tuples are in the log's order."""

    run: str = ""
    claims: tuple[Claim, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    weight_hashes: Mapping[int, str] = field(default_factory=dict)  # by version
    made_by: Mapping[int, int] = field(default_factory=dict)  # step by version; 0: no step
    published: frozenset[int] = frozenset()  # versions that workers can pull
    closed: ClosedGroups = field(default_factory=lambda: ClosedGroups(watermark=0))
    dropped: Mapping[str, int] = field(default_factory=dict)  # groups by reason
    drifted: tuple[RedoDrifted, ...] = ()
    redone: tuple[StepsRedone, ...] = ()  # by restarted trainers, from the log
    trainer_state: str = ""  # of the newest heartbeat
    trainer_detail: str = ""
    num_void: int = 0  # events of a superseded epoch

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def step_target(self) -> int:
        """Where the run ends, as the newest claim says; 0 while nobody claimed it."""
        return self.claims[-1].step_target if self.claims else 0

    @property
    def policy_version(self) -> int:
        """The newest version that the ledger made; -1 before the first claim."""
        return max(self.weight_hashes, default=-1)

    def step_of(self, policy_version: int) -> int:
        """The step that made this version; while that is not known, the version's own number."""
        return self.made_by.get(policy_version, policy_version)


# What only the owner of the newest epoch may write.
_Ledger: TypeAlias = (
    TrainerStarted | StepCompleted | GroupsDropped | TrainerHeartbeat | RedoDrifted | StepsRedone
)


class RunView:
    """Folds `steps` and `policy-versions`; of two events for one step the first counts."""

    def __init__(self) -> None:
        self._gate = StepsGate(begins_anywhere=True)
        self._run = ""
        self._claims: list[Claim] = []
        self._steps: dict[int, StepPoint] = {}
        self._hashes: dict[int, str] = {}
        self._made_by: dict[int, int] = {}
        self._published: set[int] = set()
        self._closed = ClosedGroups(watermark=0)
        self._dropped: Counter[str] = Counter()
        self._drifted: list[RedoDrifted] = []
        self._redone: list[StepsRedone] = []
        self._heartbeat: TrainerHeartbeat | None = None
        self._num_void = 0
        self._snapshot: RunState | None = None

    def apply(self, event: Event) -> None:
        """Take one event; those of other topics are passed by."""
        if isinstance(event, PolicyPublished):
            # It travels in another topic, so its order against claims is not known here: a number
            # never gets a second content, and which one it has is up to `steps`.
            self._published.add(event.policy_version)
            self._hashes.setdefault(event.policy_version, event.weight_hash)
        elif isinstance(event, _Ledger):
            self._ledger(event)
        else:
            return
        self._snapshot = None

    def _ledger(self, event: _Ledger) -> None:
        if not self._gate.admits(event):
            self._num_void += 1
            return
        if isinstance(event, TrainerStarted | StepCompleted | RedoDrifted):
            self._made_by.setdefault(event.policy_version, making_step(event))
        if isinstance(event, TrainerStarted):
            self._run = event.run
            self._claims.append(_claim(event))
            self._hashes.setdefault(event.policy_version, event.weight_hash)
        elif isinstance(event, StepCompleted):
            self._steps[event.step] = step_point(event)
            self._hashes[event.policy_version] = event.weight_hash
            self._closed = event.closed
        elif isinstance(event, GroupsDropped):
            self._dropped.update(group.reason for group in event.groups)
            self._closed = event.closed
        elif isinstance(event, RedoDrifted):
            self._drifted.append(event)
            self._hashes[event.policy_version] = event.actual_hash
        elif isinstance(event, StepsRedone):
            self._redone.append(event)
        else:
            self._heartbeat = event

    @property
    def step(self) -> int:
        """As the state's, without making one."""
        return self._gate.last_step

    @property
    def step_target(self) -> int:
        """As the state's, without making one."""
        return self._claims[-1].step_target if self._claims else 0

    @property
    def state(self) -> RunState:
        """A snapshot; the same object until the next event."""
        if self._snapshot is None:
            heartbeat = self._heartbeat
            self._snapshot = RunState(
                run=self._run,
                claims=tuple(self._claims),
                steps=tuple(self._steps.values()),
                weight_hashes=dict(self._hashes),
                made_by=dict(self._made_by),
                published=frozenset(self._published),
                closed=self._closed,
                dropped=dict(self._dropped),
                drifted=tuple(self._drifted),
                redone=tuple(self._redone),
                trainer_state=heartbeat.state if heartbeat else "",
                trainer_detail=heartbeat.detail if heartbeat else "",
                num_void=self._num_void,
            )
        return self._snapshot


def _claim(event: TrainerStarted) -> Claim:
    return Claim(
        epoch=event.epoch,
        instance=event.instance,
        next_step=event.next_step,
        step_target=event.step_target,
        policy_version=event.policy_version,
        weight_hash=event.weight_hash,
        config=event.config,
        started_at_ms=event.started_at_ms,
    )


def making_step(event: TrainerStarted | StepCompleted | RedoDrifted) -> int:
    """The step whose result the event's version is: 0 for the model that the run began with.

    Versions and steps have the same numbers until a redo drifts: a step then makes a second one.
    """
    return event.next_step - 1 if isinstance(event, TrainerStarted) else event.step


def step_point(event: StepCompleted) -> StepPoint:
    """The step without its ids; an empty batch has reward 0."""
    rewards = [sample.reward for sample in event.samples]
    return StepPoint(
        step=event.step,
        epoch=event.epoch,
        policy_version=event.policy_version,
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        loss=event.loss,
        num_samples=len(rewards),
        num_tokens=sum(sample.num_tokens for sample in event.samples),
        num_masked=len(event.masked),
        metrics=dict(event.metrics),
        staleness={int(distance): tokens for distance, tokens in event.staleness.items()},
        anchors=dict(event.anchors),
        started_at_ms=event.started_at_ms,
        finished_at_ms=event.finished_at_ms,
    )
