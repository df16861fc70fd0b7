"""The one table of every topic: its events, key, writers and readers.

Roles are held to it (`rights.py`); for tools it is documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rlstreams.schemas.events import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    ControlState,
    DeadLetter,
    DeviceLease,
    Event,
    GroupsDropped,
    OutcomeReported,
    PolicyLoaded,
    PolicyPublished,
    PolicyStored,
    Prompt,
    PullRequested,
    RedoDrifted,
    ReplacementRequested,
    RunBranched,
    ScoredTrajectory,
    SessionClosed,
    SessionOpened,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
    Trajectory,
    WorkerReport,
)


class Retention(StrEnum):
    """Kinds of retention of a topic; the periods are configuration."""

    LONG = "long"  # never removed while the run is of interest
    PAYLOAD = "payload"  # by bytes and time
    SHORT = "short"  # by time
    COMPACT = "compact"  # the last record per key, for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic: its name without the run's prefix, events, key, writers, readers, retention."""

    name: str
    events: tuple[type[Event], ...]  # empty: the value is not an event (schema text)
    key: str  # the event's field, or "run"/"fingerprint"
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    retention: Retention
    single_partition: bool = True
    is_later: bool = False  # runs and recordings of older releases are without it
    # Events with another key: compaction keeps the last record of each key.
    other_keys: Mapping[type[Event], str] = field(default_factory=dict, compare=False)

    def key_of(self, event: Event) -> str:
        """Return the key of `event`'s record."""
        return str(getattr(event, self.other_keys.get(type(event), self.key)))


PROMPTS = Topic(
    name="prompts",
    events=(Prompt,),
    key="group_id",
    written_by=("prompts",),
    read_by=("prompts", "rollout", "trainer", "audit", "views", "recorder"),
    retention=Retention.LONG,
    single_partition=False,
)
# Topics of agents. Partitioned as `prompts`, each record in its prompt's partition number: the
# worker that has a prompt has its session's calls and outcomes.
CALLS = Topic(
    name="calls",
    events=(SessionOpened, CallCommitted, CallReplayed, CallFailed, SessionClosed),
    key="session_id",
    written_by=("rollout",),
    read_by=("rollout", "audit", "views", "recorder"),
    retention=Retention.PAYLOAD,
    single_partition=False,
    is_later=True,
)
OUTCOMES = Topic(
    name="outcomes",
    events=(OutcomeReported,),
    key="session_id",
    written_by=("rollout", "operator"),
    read_by=("rollout", "audit", "views", "recorder"),
    retention=Retention.PAYLOAD,
    single_partition=False,
    is_later=True,
)
TRAJECTORIES = Topic(
    name="trajectories",
    events=(Trajectory,),
    key="group_id",
    written_by=("rollout",),
    read_by=("rollout", "logprob", "trainer", "audit", "views", "recorder"),
    retention=Retention.PAYLOAD,
    single_partition=False,
)
SCORED = Topic(
    name="scored-trajectories",
    events=(ScoredTrajectory,),
    key="group_id",
    written_by=("logprob",),
    read_by=("logprob", "trainer", "audit", "views", "recorder"),
    retention=Retention.PAYLOAD,
    single_partition=False,
)
STEPS = Topic(
    name="steps",
    events=(
        TrainerStarted,
        StepCompleted,
        GroupsDropped,
        TrainerHeartbeat,
        RedoDrifted,
        StepsRedone,
        RunBranched,
    ),
    key="run",
    written_by=("trainer", "operator"),
    read_by=("prompts", "rollout", "server", "logprob", "trainer", "audit", "views"),
    retention=Retention.LONG,
)
POLICY_VERSIONS = Topic(
    name="policy-versions",
    events=(PolicyPublished, PolicyStored),
    key="model",
    written_by=("trainer",),
    read_by=("rollout", "server", "logprob", "trainer", "audit", "views"),
    retention=Retention.LONG,
)
POLICY_PULLS = Topic(
    name="policy-pulls",
    events=(PullRequested, PolicyLoaded),
    key="worker",
    written_by=("rollout", "logprob"),
    read_by=("trainer", "audit", "views"),
    retention=Retention.LONG,
)
DEAD_LETTERS = Topic(
    name="dead-letters",
    events=(DeadLetter, ReplacementRequested),
    key="group_id",
    written_by=("rollout", "logprob", "trainer", "operator"),
    read_by=("prompts", "rollout", "logprob", "trainer", "operator", "audit", "views"),
    retention=Retention.LONG,
)
WORKER_EVENTS = Topic(
    name="worker-events",
    events=(WorkerReport,),
    key="worker",
    written_by=("prompts", "rollout", "server", "logprob", "trainer"),
    read_by=("views", "rollout", "server", "logprob"),
    retention=Retention.SHORT,
)
CONTROL = Topic(
    name="control",
    events=(ControlState, DeviceLease),
    key="run",
    written_by=("operator", "up", "rollout", "server", "logprob", "trainer"),
    read_by=("prompts", "rollout", "server", "logprob", "trainer", "up"),
    retention=Retention.COMPACT,
    other_keys={DeviceLease: "device"},
)
SCHEMAS = Topic(
    name="schemas",
    events=(),
    key="fingerprint",
    written_by=("up",),
    read_by=("any",),
    retention=Retention.COMPACT,
)

TOPICS: tuple[Topic, ...] = (
    PROMPTS,
    CALLS,
    OUTCOMES,
    TRAJECTORIES,
    SCORED,
    STEPS,
    POLICY_VERSIONS,
    POLICY_PULLS,
    DEAD_LETTERS,
    WORKER_EVENTS,
    CONTROL,
    SCHEMAS,
)
