"""How a run ended: the findings of the loop of `up`, for the summary and for chaos tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlstreams.streams.audit.report import AuditReport
from rlstreams.up.live.words import KillMark
from rlstreams.up.supervisor.fleet import Failure
from rlstreams.workers.config.run import RunConfig


class Outcome(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"  # the target is reached and the last version evaluated
    DRAINED = "drained"  # stopped before; resumable
    FAILED = "failed"  # a worker cannot go on; resumable once that is cured


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over, for now."""

    config: RunConfig
    command: str  # what started it, from `up` on, as typed, but for --steps
    resume: str  # what continues it to the same end
    steps_typed: int = 0  # by --steps; 0: the configured ones
    step: int = 0  # the newest one
    outcome: Outcome
    failure: Failure | None
    num_killed: int
    kills: Sequence[KillMark] = ()  # those that were asked for
    is_claimed: bool = True  # a trainer took the run over in this start
    audit: AuditReport
