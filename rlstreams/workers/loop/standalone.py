"""A role whose process `up` did not start: it compares its configuration, and notices the end.

`up` hands one configuration to all roles and drains them when the run is complete. Where each host
starts its own, the trainer's claim is the configuration: a worker that was started with another one
ends (78) as soon as it hears that this trainer lives; before that, the claim may be of a run that
is just being resumed. And a rollout or log-prob worker that has had nothing to do for `LINGER_S`
after the trainer said that it is done drains, as at SIGTERM.
"""

from __future__ import annotations

import time

from rlstreams.schemas.events import Event, TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.agreement import disagreement, other_release, out_of_reach
from rlstreams.workers.loop.claims import STEPS_PARTITION, TAIL, claim_at
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.loop.host import host_name
from rlstreams.workers.loop.runtime import Role, RoleAround
from rlstreams.workers.loop.stage import StageLoop

LOOK_S = 0.5
LINGER_S = 60.0  # longer than the session timeout of a group: a dead member's work comes to us


class StandaloneRole(RoleAround):
    """A `Role` around a `Role`: does what `up` does where it starts all roles.

    Consumes: `steps`, from a little before its end (TrainerStarted, TrainerHeartbeat).

    Raises:
        ConfigError: from `turn`: the trainer that lives was started with another configuration.
    """

    def __init__(self, role: Role, context: Context) -> None:
        super().__init__(role)
        self._context = context
        self._history = context.bus.ends(STEPS.name)[STEPS_PARTITION]
        self._reader = context.bus.reader({STEPS_PARTITION: max(0, self._history - TAIL)})
        self._foreign = ForeignRecords(context.worker, context.bus.schemas())
        self._log = context.log
        self._epoch = -1  # of the claim that was compared
        self._is_over = False  # the trainer is done, and has made all steps that we know of
        self._idle_since_s: float | None = None
        self._next_s = 0.0

    def turn(self) -> None:
        """Look around now and then; then the role's own turn."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            for record in self._foreign.readable(self._reader.poll(TAIL, 0.0)):
                self._take(record.event, record.position)
            self._leave_if_over(now_s)
        super().turn()

    def close(self) -> None:
        """See `Role`."""
        self._reader.close()
        super().close()

    def _take(self, event: Event, position: Position) -> None:
        is_new = position.offset >= self._history
        if isinstance(event, TrainerStarted):
            self._is_over = False
            if is_new:
                self._compare(event)
        elif isinstance(event, TrainerHeartbeat):
            asked_for = self._context.config.trainer.steps
            self._is_over = event.state == "done" and event.next_step > asked_for
            if is_new and event.state != "done" and event.epoch > self._epoch:
                self._compare(claim_at(self._context.bus, event.claim_offset, self._foreign))

    def _compare(self, claim: TrainerStarted | None) -> None:
        if claim is None or claim.epoch <= self._epoch:
            return
        self._epoch = claim.epoch
        role, here = self._context.role, host_name()
        if role != "prompts" and (problem := out_of_reach(claim, here)):
            raise ConfigError(f"{self._context.worker} on host {here}: {problem}")
        if found := disagreement(self._context.config, role, claim):
            raise ConfigError(
                f"{self._context.worker} on host {here} and the trainer on host "
                f"{claim.host or '?'} (epoch {claim.epoch}) do not run the same: {found}; start "
                "every role of a run with one configuration"
            )
        if found := other_release(claim):
            self._log.warning("other_release", what=found)

    def _leave_if_over(self, now_s: float) -> None:
        is_idle = isinstance(self._role, StageLoop) and self._role.is_idle
        if not (self._is_over and is_idle):
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= LINGER_S and not self._is_draining:
            self._log.info("run_over", what=f"the trainer is done, no work for {LINGER_S:g} s")
            self.drain()
