"""What an event is about: its sample, step, version and row of the data set. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    Prompt,
    PullRequested,
    RedoDrifted,
    ReplacementRequested,
    ScoredTrajectory,
    StepCompleted,
    StepsRedone,
    TrainerStarted,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """None where an event has no such thing."""

    group_id: str | None = None
    sample: int | None = None
    step: int | None = None
    version: int | None = None  # what it made, announced or loaded; the newest that sampled it
    oldest_version: int | None = None  # the oldest that sampled it
    row: int | None = None  # of the data set

    @property
    def name(self) -> str | None:
        """Of the sample: `17/3`."""
        return None if self.sample is None else f"{self.group_id}/{self.sample}"


def facts_of(event: Event | None) -> Facts:
    """What the event says; of a record that is no event, nothing."""
    match event:
        case Prompt(group_id=group, sample=sample, row=row):
            version = event.min_policy_version
            return Facts(group_id=group, sample=sample, version=version, row=row)
        case Trajectory():
            return _of_trajectory(event)
        case ScoredTrajectory(trajectory=trajectory):
            return _of_trajectory(trajectory)
        case DeadLetter(group_id=group, sample=sample, row=row):
            return Facts(group_id=group, sample=sample, row=row)
        case ReplacementRequested(group_id=group):
            return Facts(group_id=group)
        case StepCompleted() | PolicyPublished() | RedoDrifted():
            return Facts(step=event.step, version=event.policy_version)
        case StepsRedone(last_step=step):
            return Facts(step=step)
        case TrainerStarted() | PolicyLoaded() | PullRequested():
            return Facts(version=event.policy_version)
    return Facts()


def _of_trajectory(trajectory: Trajectory) -> Facts:
    versions = [s.policy_version for s in trajectory.segments if s.author == "policy"]
    return Facts(
        group_id=trajectory.group_id,
        sample=trajectory.sample,
        version=max(versions, default=None),
        oldest_version=min(versions, default=None),
        row=trajectory.row,
    )
