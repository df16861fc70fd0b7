"""Gives a run up that makes no step under faults, so that a hang ends as a failure."""

from __future__ import annotations

import time

from rlstreams.start.chaos.journal import Journal
from rlstreams.up.supervisor.fault_hook import FaultTargets

FACTOR = 1.5  # the detector of `up` comes first: it knows who is waited for


class ProgressDeadline:
    """Counts from the last step, and from whatever excuses the next one's delay.

    Args:
        stall_s: without a step for somewhat longer the run is given up; 0: never.
    """

    def __init__(self, stall_s: float) -> None:
        self._limit_s = FACTOR * stall_s
        self._since_s = time.monotonic()
        self._step = -1

    def renew(self) -> None:
        """Something was broken, or woken."""
        self._since_s = time.monotonic()

    def check(self, targets: FaultTargets, journal: Journal) -> bool:
        """Whether there was a step since the last call; gives up if there was none for too long."""
        step = targets.watcher.step
        if step > self._step:
            self._step = step
            self.renew()
            return True
        if self._limit_s and time.monotonic() - self._since_s > self._limit_s:
            since = (
                f"; the last fault: {journal.injections[-1].fault.told}"
                if journal.injections
                else ""
            )
            targets.fleet.give_up(f"no step for {self._limit_s:g} s, after step {step}{since}")
        return False
