"""Index columns of an event: its sample, step, version and row of the data set. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlstreams.schemas.events import Event, Prompt, ScoredTrajectory, StepsRedone, Trajectory


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
    subject = event.trajectory if isinstance(event, ScoredTrajectory) else event
    versions: list[Any]
    if isinstance(subject, Trajectory):
        versions = [s.policy_version for s in subject.segments if s.author == "policy"]
    elif isinstance(subject, Prompt):
        versions = [subject.min_policy_version]
    else:
        versions = [getattr(subject, "policy_version", None)]
    step = subject.last_step if isinstance(subject, StepsRedone) else getattr(subject, "step", None)
    return Facts(
        group_id=getattr(subject, "group_id", None),
        sample=getattr(subject, "sample", None),
        step=step,
        version=max(versions, default=None),
        oldest_version=min(versions, default=None),
        row=getattr(subject, "row", None),
    )
