"""Every crash point of every role once: each process of a worker is started with the next one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlstreams.start.chaos.journal import Conclude, Injection, Journal
from rlstreams.start.chaos.plan import Fault
from rlstreams.start.chaos.step_deadline import StepDeadline
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.up.supervisor.fault_hook import FaultTargets

if TYPE_CHECKING:
    from rlstreams.up.supervisor.fault_hook import Ended


class Sweep:
    """A `FaultHook`: the faults of each worker, one process after another.

    Args:
        faults: of kind ARMED.
        stall_s: see `StepDeadline`.
    """

    def __init__(
        self, faults: Sequence[Fault], conclude: Conclude, *, stall_s: float = 0.0
    ) -> None:
        self.journal = Journal(planned=faults)
        self._deadline = StepDeadline(stall_s)
        self._conclude = conclude
        self._targets: FaultTargets | None = None
        self._num_read = 0  # exits

    def enter(self, targets: FaultTargets) -> None:
        """See `FaultHook`."""
        self._targets = targets
        for fault in self.journal.planned:
            targets.fleet.of(fault.role)[fault.ordinal].crash_at.append(fault.crash_at)

    def tick(self, *, is_running: bool) -> None:
        """See `FaultHook`."""
        targets = self._targets
        assert targets is not None, "tick before enter"
        for exited in targets.fleet.exits[self._num_read :]:
            if exited.died_at:
                self._note(targets, exited.worker, exited.died_at, exited.instance)
        self._num_read = len(targets.fleet.exits)
        if is_running:
            self._deadline.tick(targets, self.journal)

    def conclude(self, bus: Bus, ended: Ended, status: int) -> int:
        """See `FaultHook`."""
        assert self._targets is not None, "conclude before enter"
        return self._conclude(bus, ended, status, self.journal, self._targets)

    def _note(self, targets: FaultTargets, worker: str, died_at: str, instance: str) -> None:
        self.journal.injections.append(
            Injection(
                fault=next(
                    fault
                    for fault in self.journal.planned
                    if (fault.victim, fault.crash_at) == (worker, died_at)
                ),
                instance=instance,
                step=targets.watcher.step,
                at_s=time.monotonic(),
                at_ms=now_ms(),
            )
        )
