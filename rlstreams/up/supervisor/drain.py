"""Drains a fleet in order: no role waits for work from one that has already exited."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from rlstreams.up.supervisor.fleet import DRAIN_ORDER, GRACE_S, Fleet

SAY_S = 5.0  # a wait for a checkpoint that takes longer is told


class Drain:
    """Lets the roles finish, one after another. `tick` often; it never waits.

    Args:
        drain_s: how long a role may take, but for `GRACE_S` and for a checkpoint.
        save_s: how long a checkpoint may take, whenever it began: nobody is killed within it.
    """

    def __init__(
        self, fleet: Fleet, drain_s: float, say: Callable[[str], None], *, save_s: float
    ) -> None:
        self._fleet = fleet
        self._limit_s = drain_s + GRACE_S
        self._save_s = save_s
        self._say = say
        self._left = list(DRAIN_ORDER)
        self._deadline_s: float | None = None
        self._saving_since_s: float | None = None  # as far as this drain has seen it
        self._is_save_told = False
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
                self._await_checkpoint(role, now_s)
                self._kill_late(role, now_s)
                return
            self._left.pop(0)
            self._deadline_s = self._saving_since_s = None

    def _await_checkpoint(self, role: str, now_s: float) -> None:
        """Follow whether a checkpoint is written; behind its end there is the time for an exit."""
        saving = self._fleet.saving(role)
        if not saving:
            if self._saving_since_s is not None and self._deadline_s is not None:
                self._deadline_s = max(self._deadline_s, now_s + GRACE_S)
            self._saving_since_s = None
            return
        if self._saving_since_s is None:
            self._saving_since_s = now_s
        if not self._is_save_told and now_s - self._saving_since_s >= SAY_S:
            self._is_save_told = True
            self._say(
                f"{', '.join(saving)} writes a checkpoint: the drain waits for it, at most "
                f"{self._save_s:g} s; a second Ctrl-C kills"
            )

    def _kill_late(self, role: str, now_s: float) -> None:
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        problem = f"did not drain within {self._limit_s:g} s"
        if self._saving_since_s is not None:
            if now_s < self._saving_since_s + self._save_s + GRACE_S:
                return
            problem = f"has not finished its checkpoint within {self._save_s:g} s"
        late = [worker.name for worker in self._fleet.of(role) if worker.is_alive]
        self._say(f"{', '.join(late)} {problem}: killed")
        self.abandoned += late
        self._deadline_s = now_s + self._limit_s
        self._fleet.stop(role, signal.SIGKILL)
