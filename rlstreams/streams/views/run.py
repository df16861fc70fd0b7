"""The run by its ledger: claims, a point for each step, versions, drops, redone steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlstreams.schemas.events import (
    NO_VERSION,
    RunBranched,
    StepCompleted,
    StepsRedone,
    TrainerStarted,
)
from rlstreams.streams.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """The figures of one step, without its samples' ids."""

    step: int
    epoch: int
    policy_version: int
    reward: float  # mean over the batch
    loss: float
    num_samples: int
    num_groups: int
    num_tokens: int  # prompts included
    num_masked: int  # segments
    metrics: Mapping[str, float]
    staleness: Mapping[int, int]  # trained tokens by versions of distance
    started_at_ms: int
    finished_at_ms: int
    judged_by: tuple[str, ...] = ()  # digests of its samples' graders, as far as recorded
    num_dropped: int = 0  # groups dropped since the step before; set by `RunView`


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run up to its newest record. All tuples are in the log's order."""

    branch: RunBranched | None = None  # the step of another run that this one continues
    claims: tuple[TrainerStarted, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    policy_version: int = NO_VERSION  # the newest that the ledger made
    made_by: Mapping[int, int] = field(default_factory=dict)  # step by version; 0: no step
    dropped: Mapping[str, int] = field(default_factory=dict)  # groups by reason
    redone: tuple[StepsRedone, ...] = ()  # by restarted trainers, from the log
    num_drifts: int = 0  # redone steps that gave other weights
    num_void: int = 0  # events of a superseded epoch

    @property
    def step(self) -> int:
        """The newest step; before the first 0, or the one that a branch begins with."""
        if self.steps:
            return self.steps[-1].step
        return self.branch.step if self.branch else 0

    @property
    def first_version(self) -> int:
        """The version that the run began with."""
        return self.branch.policy_version if self.branch else 0

    @property
    def step_target(self) -> int:
        """The last step of the run by the newest claim; 0 before the first claim."""
        return self.claims[-1].step_target if self.claims else 0

    def step_of(self, policy_version: int) -> int:
        """Return the step that made this version; while that is unknown, the version's number."""
        return self.made_by.get(policy_version, policy_version)


class RunView:
    """Points of a ledger's steps, for screens; fed by events of the ledger.

    Args:
        ledger: a ledger that keeps its steps.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._steps: list[StepPoint] = []
        self._redone: list[StepsRedone] = []
        self.judges: tuple[str, ...] = ()  # digests of the newest samples' graders, if recorded
        self._dropped = 0  # groups dropped up to the newest step
        self.ledger = ledger
        ledger.listen(
            on_step=lambda event, _: self._add(event),
            on_redone=lambda event, _: self._redone.append(event),
        )

    def _add(self, event: StepCompleted) -> None:
        before, self._dropped = self._dropped, self.ledger.num_dropped.total()
        point = step_point(event)
        self.judges = point.judged_by or self.judges
        self._steps.append(replace(point, num_dropped=self._dropped - before))

    @property
    def state(self) -> RunState:
        """A snapshot."""
        ledger = self.ledger
        return RunState(
            branch=ledger.branch,
            claims=tuple(ledger.claims.values()),
            steps=tuple(self._steps),
            policy_version=ledger.policy_version,
            made_by=dict(ledger.made_by),
            dropped=dict(ledger.num_dropped),
            redone=tuple(self._redone),
            num_drifts=ledger.num_drifts,
            num_void=ledger.num_void,
        )


def step_point(event: StepCompleted) -> StepPoint:
    """Return a step without its samples' ids; an empty batch has reward 0."""
    rewards = [sample.reward for sample in event.samples]
    return StepPoint(
        step=event.step,
        epoch=event.epoch,
        policy_version=event.policy_version,
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        loss=event.loss,
        num_samples=len(rewards),
        num_groups=len({sample.group_id for sample in event.samples}),
        num_tokens=sum(sample.num_tokens for sample in event.samples),
        num_masked=len(event.masked),
        metrics=dict(event.metrics),
        staleness={int(distance): tokens for distance, tokens in event.staleness.items()},
        started_at_ms=event.started_at_ms,
        finished_at_ms=event.finished_at_ms,
        judged_by=tuple(sorted(filter(None, event.judged_by))),
    )
