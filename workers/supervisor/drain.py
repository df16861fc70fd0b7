"""Drains a fleet in order: no role waits for work from one that has already exited."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from workers.supervisor.fleet import DRAIN_ORDER, GRACE_S, Fleet


class Drain:
    """Lets the roles finish, one after another. `tick` often; it never waits."""

    def __init__(self, fleet: Fleet, drain_s: float, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._limit_s = drain_s + GRACE_S
        self._say = say
        self._left = list(DRAIN_ORDER)
        self._deadline_s: float | None = None
        self.abandoned: list[str] = []  # workers that had to be killed
        fleet.is_draining = True

    @property
    def is_over(self) -> bool:
        """Whether no process is left."""
        return not self._left

    def tick(self) -> None:
        """Ask the next role to drain once the one before is gone; kill it at its deadline."""
        now_s = time.monotonic()
        while self._left:
            role = self._left[0]
            if not self._fleet.is_gone(role) and self._deadline_s is None:
                self._deadline_s = now_s + self._limit_s
                self._fleet.stop(role, signal.SIGTERM)
            if not self._fleet.is_gone(role):
                self._kill_late(role, now_s)
                return
            self._left.pop(0)
            self._deadline_s = None

    def _kill_late(self, role: str, now_s: float) -> None:
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        late = [worker.name for worker in self._fleet.of(role) if worker.is_alive]
        self._say(f"{', '.join(late)} did not drain within {self._limit_s:g} s: killed")
        self.abandoned += late
        self._deadline_s = now_s + self._limit_s
        self._fleet.stop(role, signal.SIGKILL)
