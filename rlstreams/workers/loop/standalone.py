"""A role whose process `up` did not start: it ends by itself with the run.

`up` drains its roles when the run is complete. Where each host starts its own, a rollout worker,
log-prob worker or server drains, as at SIGTERM, once it has had nothing to do for `LINGER_S` after
the trainer reported that it is done.
"""

from __future__ import annotations

from rlstreams.schemas.events import Event, TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.record import Position
from rlstreams.workers.loop.compared import ComparedRole
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.runtime import Idling, Role

LINGER_S = 60.0  # longer than a group's session timeout: a dead member's work comes to us


class StandaloneRole(ComparedRole):
    """A compared role that leaves when the run is over, as under `up`."""

    def __init__(self, role: Role, context: Context) -> None:
        super().__init__(role, context)
        self._steps_asked_for = context.config.trainer.steps
        self._log = context.log
        self._is_over = False  # the trainer is done, and has made all known steps
        self._idle_since_s: float | None = None

    def _take(self, event: Event, position: Position) -> None:
        super()._take(event, position)
        if isinstance(event, TrainerStarted):
            self._is_over = False
        elif isinstance(event, TrainerHeartbeat):
            self._is_over = event.state == "done" and event.next_step > self._steps_asked_for

    def _looked(self, now_s: float) -> None:
        is_idle = isinstance(self._role, Idling) and self._role.is_idle
        if not (self._is_over and is_idle):
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= LINGER_S and not self._is_draining:
            self._log.info("run_over", what=f"the trainer is done, no work for {LINGER_S:g} s")
            self.drain()
