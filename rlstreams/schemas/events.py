"""Every event, by name. A test keeps this table and the `.avsc` files in step."""

from __future__ import annotations

from typing import TypeAlias, get_args

from rlstreams.schemas.calls import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    OutcomeReported,
    SessionClosed,
    SessionOpened,
)
from rlstreams.schemas.operations import (
    ControlState,
    DeadLetter,
    DeviceLease,
    ReplacementRequested,
    ServerLoad,
    WorkerReport,
)
from rlstreams.schemas.policy import (
    Endpoint,
    PolicyLoaded,
    PolicyPublished,
    PolicyStored,
    PullRequested,
    StoredFile,
)
from rlstreams.schemas.rollouts import (
    EVALUATE,
    NO_VERSION,
    TRAIN,
    Prompt,
    ScoredTrajectory,
    Segment,
    SegmentScore,
    Trajectory,
)
from rlstreams.schemas.steps import (
    AbsentSample,
    ClosedGroups,
    DroppedGroup,
    GroupsDropped,
    MaskedSegment,
    OpenGroup,
    PartitionPosition,
    PassedOverCheckpoint,
    RedoDrifted,
    RunBranched,
    SampleRef,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.schemas.tensor import Tensor, TensorError

Event: TypeAlias = (
    Prompt
    | Trajectory
    | ScoredTrajectory
    | TrainerStarted
    | StepCompleted
    | GroupsDropped
    | TrainerHeartbeat
    | RedoDrifted
    | StepsRedone
    | RunBranched
    | PolicyPublished
    | PolicyStored
    | PullRequested
    | PolicyLoaded
    | DeadLetter
    | ReplacementRequested
    | WorkerReport
    | ControlState
    | DeviceLease
    | SessionOpened
    | CallCommitted
    | CallReplayed
    | CallFailed
    | SessionClosed
    | OutcomeReported
)

EVENTS: tuple[type[Event], ...] = get_args(Event)

__all__ = [
    "EVALUATE",
    "EVENTS",
    "NO_VERSION",
    "TRAIN",
    "AbsentSample",
    "CallCommitted",
    "CallFailed",
    "CallReplayed",
    "ClosedGroups",
    "ControlState",
    "DeadLetter",
    "DeviceLease",
    "DroppedGroup",
    "Endpoint",
    "Event",
    "GroupsDropped",
    "MaskedSegment",
    "OpenGroup",
    "OutcomeReported",
    "PartitionPosition",
    "PassedOverCheckpoint",
    "PolicyLoaded",
    "PolicyPublished",
    "PolicyStored",
    "Prompt",
    "PullRequested",
    "RedoDrifted",
    "ReplacementRequested",
    "RunBranched",
    "SampleRef",
    "ScoredTrajectory",
    "Segment",
    "SegmentScore",
    "ServerLoad",
    "SessionClosed",
    "SessionOpened",
    "StepCompleted",
    "StepsRedone",
    "StoredFile",
    "Tensor",
    "TensorError",
    "TrainerHeartbeat",
    "TrainerStarted",
    "Trajectory",
    "WorkerReport",
]
