"""What `up` is asked, how the run ended, and its interface to fault injection."""

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


class Outcome(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"  # the target is reached and the last version evaluated
    DRAINED = "drained"  # stopped before; resumable
    FAILED = "failed"  # a worker cannot go on; resumable once that is cured


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the command line asks of `up`."""

    config: RunConfig
    command: str  # what starts it, from `up` on, as typed: for commands to try
    is_resumed: bool
    is_live: bool
    steps_typed: int = 0  # by --steps, which is not in `command`; 0: the configured ones
    web_port: int | None = None  # of the live page; None: none is wanted
    figures: Figures | None = None  # where they are written too; None: nowhere

    @property
    def resume(self) -> str:
        """What continues this run as far as it was asked for."""
        return f"{self.command} --resume" + f" --steps {self.steps_typed}" * bool(self.steps_typed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over, for now."""

    options: UpOptions
    step: int = 0  # the newest one
    outcome: Outcome
    failure: Failure | None
    num_killed: int
    kills: Sequence[KillMark] = ()  # those that were asked for
    is_claimed: bool = True  # a trainer took the run over in this start
    audit: AuditReport | None  # None: a replay wrote its steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTargets:
    """What can be broken, and who watches it."""

    fleet: Fleet
    broker: BrokerKeeper | None  # None: it is not ours
    watcher: Watcher


class FaultHook(Protocol):
    """Breaks a run; `up` calls it and knows nothing of how."""

    def enter(self, targets: FaultTargets) -> None:
        """Before the first worker is started."""

    def tick(self, *, is_running: bool) -> None:
        """Often, and never waiting. Once `is_running` is False nothing more may be broken, and
        what sleeps must be woken."""

    def conclude(self, bus: Bus, ended: Ended, status: int) -> int:
        """After the last line of `up`, while the broker still runs; the final exit status.

        Args:
            status: 0 if the run is complete and its audit found nothing.
        """
