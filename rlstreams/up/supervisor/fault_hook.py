"""Options of `up`, the outcome of its run, and its interface to fault injection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.log.bus import Bus
from rlstreams.up.live.figures import Figures
from rlstreams.up.supervisor.broker import BrokerKeeper
from rlstreams.up.supervisor.fleet import Failure, Fleet
from rlstreams.up.supervisor.watcher import Watcher
from rlstreams.words.screen import KillMark
from rlstreams.workers.config.run import RunConfig


class RunOutcome(StrEnum):
    """Outcome of a run."""

    COMPLETE = "complete"  # the target is reached and the last version evaluated
    DRAINED = "drained"  # stopped before; resumable
    FAILED = "failed"  # a worker cannot go on; resumable once that is cured


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `up`, from the command line."""

    config: RunConfig
    command: str  # arguments that start it, from `up` on, as typed: for commands to try
    is_resumed: bool
    is_live: bool
    steps_typed: int = 0  # by --steps, which is not in `command`; 0: the configured ones
    web_port: int | None = None  # of the live page; None: none is wanted
    figures: Figures | None = None  # where they are written too; None: nowhere

    @property
    def resume(self) -> str:
        """Command that continues this run, up to the steps that were typed."""
        return f"{self.command} --resume" + f" --steps {self.steps_typed}" * bool(self.steps_typed)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that is over, for now."""

    options: UpOptions
    step: int = 0  # the newest one
    outcome: RunOutcome
    failure: Failure | None
    num_killed: int
    kills: Sequence[KillMark] = ()  # those that were asked for
    is_claimed: bool = True  # a trainer took the run over in this start
    audit: AuditReport | None  # None: a replay wrote its steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTargets:
    """Processes that a fault can hit, and the watcher of the run."""

    fleet: Fleet
    broker: BrokerKeeper | None  # None: it is not ours
    watcher: Watcher


class FaultHook(Protocol):
    """Breaks a run; `up` calls it and knows nothing of how."""

    def enter(self, targets: FaultTargets) -> None:
        """Begin, before the first worker is started."""

    def tick(self, *, is_running: bool) -> None:
        """Break what is due; called often, never waits. Once `is_running` is False it breaks
        nothing more, and wakes each process that sleeps."""

    def conclude(self, bus: Bus, ended: EndedRun, status: int) -> int:
        """Return the final exit status; called after the last line of `up`, with a live broker.

        Args:
            status: 0 if the run is complete and its audit found nothing.
        """
