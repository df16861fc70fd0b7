"""The run as its ledger has it: claims, a point for each step, versions, drops, redone steps."""

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
    """What one step says of itself, without its samples' ids."""

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
    judged_by: tuple[str, ...] = ()  # by what its samples were judged, as far as that is told
    num_dropped: int = 0  # groups, since the step before; `RunView` knows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run up to its newest record. All tuples are in the log's order."""

    branch: RunBranched | None = None  # where another run was, and this one goes on
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
        """With which it began."""
        return self.branch.policy_version if self.branch else 0

    @property
    def step_target(self) -> int:
        """Where the run ends, as the newest claim says; 0 while nobody claimed it."""
        return self.claims[-1].step_target if self.claims else 0

    def step_of(self, policy_version: int) -> int:
        """The step that made this version; while that is not known, the version's own number."""
        return self.made_by.get(policy_version, policy_version)


class RunView:
    """What a ledger says of each step, for who shows them; who feeds the ledger feeds this.

    Args:
        ledger: that keeps its steps.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._steps: list[StepPoint] = []
        self._redone: list[StepsRedone] = []
        self.judges: tuple[str, ...] = ()  # by what the newest samples were judged, where told
        self._dropped = 0  # groups, up to the newest step
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
    """The step without its ids; an empty batch has reward 0."""
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
