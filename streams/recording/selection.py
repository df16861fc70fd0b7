"""Selection of records by topic, step and group. Pure.

The same words choose what is recorded and what is replayed. A record that has no such property (a
heartbeat has no group) is left out where one is asked for; claims (`TrainerStarted`) and the topic
`schemas` stay in any case, for nothing can be understood without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlstreams.schemas.events import (
    Event,
    GroupsDropped,
    PolicyPublished,
    Prompt,
    ScoredTrajectory,
    StepCompleted,
    StepsRedone,
    TrainerStarted,
    Trajectory,
)
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import SCHEMAS


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Index columns of an event; None where it has no such thing."""

    group_id: str | None = None
    sample: int | None = None
    step: int | None = None
    version: int | None = None  # what it made, announced or loaded; the newest that sampled it

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
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `first` to `last`, both included."""

    first: float = -math.inf
    last: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.first <= number <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for; every field that is given must hold.

    A record about a sample (it has a group) must be in `groups`; any other one in `steps`, else it
    must name one of the groups. So `steps` alone means nothing for samples: whoever asks for steps
    also gives their groups.
    """

    topics: frozenset[str] = frozenset()
    steps: Range | None = None
    groups: frozenset[str] | None = None

    def wants_partition(self, partition: Partition) -> bool:
        """Whether anything of it can be meant."""
        return not self.topics or partition.topic in self.topics

    def wants(self, raw: RawRecord, event: Event | None) -> bool:
        """Whether this record is meant; `event` is None if it is none."""
        if not self.wants_partition(raw.partition):
            return False
        if raw.position.topic == SCHEMAS.name or isinstance(event, TrainerStarted):
            return True
        return (self.steps is None and self.groups is None) or self._wants_subject(event)

    def _wants_subject(self, event: Event | None) -> bool:
        facts, groups = facts_of(event), self.groups or frozenset()
        if facts.group_id is not None:
            return self.groups is None or facts.group_id in groups
        if self.steps is not None:
            # A step starts from the version of the step before.
            is_base = isinstance(event, PolicyPublished) and (facts.step or 0) + 1 in self.steps
            return facts.step is not None and (is_base or facts.step in self.steps)
        if isinstance(event, StepCompleted):
            return any(ref.group_id in groups for ref in event.samples)
        return isinstance(event, GroupsDropped) and any(
            group.group_id in groups for group in event.groups
        )
