"""Every event, by name. A test keeps this table and the `.avsc` files in step."""

from __future__ import annotations

from typing import TypeAlias

from schemas.operations import ControlState, DeadLetter, WorkerReport
from schemas.policy import Endpoint, PolicyLoaded, PolicyPublished, PullRequested
from schemas.rollouts import (
    EVALUATE,
    NO_VERSION,
    TRAIN,
    Prompt,
    ScoredTrajectory,
    Segment,
    SegmentScore,
    Trajectory,
)
from schemas.steps import (
    AbsentSample,
    ClosedGroups,
    DroppedGroup,
    GroupsDropped,
    MaskedSegment,
    PartitionPosition,
    RedoDrifted,
    SampleRef,
    StepCompleted,
    TrainerHeartbeat,
    TrainerStarted,
)
from schemas.tensor import Tensor, TensorError

Event: TypeAlias = (
    Prompt
    | Trajectory
    | ScoredTrajectory
    | TrainerStarted
    | StepCompleted
    | GroupsDropped
    | TrainerHeartbeat
    | RedoDrifted
    | PolicyPublished
    | PullRequested
    | PolicyLoaded
    | DeadLetter
    | WorkerReport
    | ControlState
)

EVENTS: tuple[type[Event], ...] = (
    Prompt,
    Trajectory,
    ScoredTrajectory,
    TrainerStarted,
    StepCompleted,
    GroupsDropped,
    TrainerHeartbeat,
    RedoDrifted,
    PolicyPublished,
    PullRequested,
    PolicyLoaded,
    DeadLetter,
    WorkerReport,
    ControlState,
)

__all__ = [
    "EVALUATE",
    "EVENTS",
    "NO_VERSION",
    "TRAIN",
    "AbsentSample",
    "ClosedGroups",
    "ControlState",
    "DeadLetter",
    "DroppedGroup",
    "Endpoint",
    "Event",
    "GroupsDropped",
    "MaskedSegment",
    "PartitionPosition",
    "PolicyLoaded",
    "PolicyPublished",
    "Prompt",
    "PullRequested",
    "RedoDrifted",
    "SampleRef",
    "ScoredTrajectory",
    "Segment",
    "SegmentScore",
    "StepCompleted",
    "Tensor",
    "TensorError",
    "TrainerHeartbeat",
    "TrainerStarted",
    "Trajectory",
    "WorkerReport",
]
