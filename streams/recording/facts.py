"""What the index remembers of each record, so that it is found without reading the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

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
    """Columns of the index; None where an event has no such thing."""

    group_id: str | None = None
    sample: int | None = None
    attempt: int | None = None
    purpose: str | None = None
    step: int | None = None
    version: int | None = None  # what it made, announced or loaded; the newest that sampled it
    oldest_version: int | None = None  # the oldest that sampled it
    reward: float | None = None
    mismatch: float | None = None  # largest |proximal - behavior| under the sampling version, nats
    row: int | None = None  # of the data set


NOTHING = Facts()


def facts_of(event: Event | None) -> Facts:
    """What to remember; of a record that is no event, nothing."""
    found = NOTHING
    match event:
        case Prompt():
            found = Facts(
                group_id=event.group_id,
                sample=event.sample,
                attempt=0,
                purpose=event.purpose,
                version=event.min_policy_version,
                row=event.row,
            )
        case Trajectory():
            found = _of_trajectory(event)
        case ScoredTrajectory():
            found = _of_trajectory(event.trajectory, mismatch_of(event))
        case DeadLetter():
            found = Facts(
                group_id=event.group_id,
                sample=event.sample,
                purpose=event.purpose,
                row=event.row,
            )
        case ReplacementRequested():
            found = Facts(group_id=event.group_id)
        case StepCompleted() | PolicyPublished() | RedoDrifted():
            found = Facts(step=event.step, version=event.policy_version)
        case StepsRedone():
            found = Facts(step=event.last_step)
        case TrainerStarted() | PolicyLoaded() | PullRequested():
            found = Facts(version=event.policy_version)
    return found


def _of_trajectory(trajectory: Trajectory, mismatch: float | None = None) -> Facts:
    versions = [s.policy_version for s in trajectory.segments if s.author == "policy"]
    return Facts(
        group_id=trajectory.group_id,
        sample=trajectory.sample,
        attempt=trajectory.attempt,
        purpose=trajectory.purpose,
        version=max(versions, default=None),
        oldest_version=min(versions, default=None),
        reward=trajectory.reward,
        row=trajectory.row,
        mismatch=mismatch,
    )


def mismatch_of(scored: ScoredTrajectory) -> float | None:
    """Largest difference between engine and trainer numerics under one version, nats.

    None if no segment was scored under the version that sampled it, or lengths do not fit.
    """
    worst: float | None = None
    for score in scored.scores:
        if score.anchor != "sampled" or score.segment >= len(scored.trajectory.segments):
            continue
        behavior = scored.trajectory.segments[score.segment].behavior_logprobs
        if behavior is None or behavior.shape != score.proximal_logprobs.shape or not len(behavior):
            continue
        try:
            gaps = np.abs(score.proximal_logprobs.numpy() - behavior.numpy())
            worst = max(worst or 0.0, float(gaps.max()))
        except ValueError:  # the trainer sets such a sample aside; here it is only kept
            continue
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedFact:
    """A sample that a step trained on."""

    group_id: str
    sample: int
    step: int
    partition: int  # of scored-trajectories
    offset: int
    staleness: int  # versions, of its oldest trained segment


def trained_by(event: Event | None) -> Iterator[TrainedFact]:
    """The samples of a step."""
    if isinstance(event, StepCompleted):
        for ref in event.samples:
            yield TrainedFact(
                group_id=ref.group_id,
                sample=ref.sample,
                step=event.step,
                partition=ref.partition,
                offset=ref.offset,
                staleness=_stored(event.policy_version - 1 - ref.oldest_policy_version),
            )


def _stored(number: int) -> int:
    """As far as 64 bits hold it."""
    return max(-(1 << 63), min(number, (1 << 63) - 1))
