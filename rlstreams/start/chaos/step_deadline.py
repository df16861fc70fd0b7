"""Gives a run up that makes no step under faults, though every stage makes progress."""

from __future__ import annotations

import time

from rlstreams.start.chaos.journal import Journal
from rlstreams.up.supervisor.fault_hook import FaultTargets
from rlstreams.up.supervisor.stall_watch import StallClock

FACTOR = 1.5  # the detector of `up` comes first: it knows who is waited for


class StepDeadline:
    """Counts from the last step or fault.

    Args:
        stall_s: without a step for somewhat longer the run is given up; 0: never.
    """

    def __init__(self, stall_s: float) -> None:
        self._limit_s, self._clock = FACTOR * stall_s, StallClock()

    def tick(self, targets: FaultTargets, journal: Journal, *, counts: bool = True) -> None:
        """Give up when it is time.

        Args:
            counts: whether a step can be expected, as far as the faults allow one.
        """
        watcher = targets.watcher
        counts = counts and watcher.stall.expects_step and not watcher.progress.at_target
        mark = watcher.step, len(journal.injections)
        if 0 < self._limit_s <= self._clock.tick(time.monotonic(), mark, counts=counts):
            last = journal.injections[-1].fault.told if journal.injections else "none yet"
            targets.fleet.give_up(
                f"no step for {self._limit_s:g} s ({FACTOR:g} x deadlines.stall_s) after step "
                f"{watcher.step}; the last fault: {last}"
            )
