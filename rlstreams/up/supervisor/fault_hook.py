"""Hooks for deliberate fault injection: called in each turn of the loop of `up`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlstreams.streams.log.bus import Bus
from rlstreams.up.supervisor.broker import BrokerKeeper
from rlstreams.up.supervisor.fleet import Fleet
from rlstreams.up.supervisor.watcher import Watcher

if TYPE_CHECKING:
    from rlstreams.up.supervisor.ended import Ended


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
