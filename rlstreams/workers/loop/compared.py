"""A role that compares itself with each claim of a living trainer, at its start and later.

`up` hands one configuration to all roles, and each host of a run without it has its own; files of
user code may have been edited since the trainer began, under `up` as anywhere. The trainer's claim
has the configuration of all: a worker that was started with another one ends (78) as soon as it
learns that this trainer lives. Under a supervisor these are the claims above the newest epoch when
`up` began. Without one, the claim before our start may be of a run that is just being resumed, so
only a new claim binds, or a heartbeat of the trainer that made the old one.
"""

from __future__ import annotations

import time

from rlstreams.schemas.events import Event, TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.loop.agreement import (
    disagreement,
    other_files_text,
    other_release,
    out_of_reach,
)
from rlstreams.workers.loop.claims import STEPS_PARTITION, TAIL, claim_at, newest_claim
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.loop.host import host_name
from rlstreams.workers.loop.runtime import Role, RoleAround

LOOK_S = 0.5
AGAIN = (
    "put them back; or stop the run and go on with `--resume`, which records the change; or let "
    'roles go on with what they find: run.on_changed_code = "record"'
)


class OtherClaimError(StreamsError):
    """The run goes on under another configuration than that of a worker that joined."""


class ClaimCheck:
    """Compares this process's configuration and files with a claim.

    With `run.on_changed_code` "record" changed files are logged and reported, and the work goes on:
    each sample records its judge, and samples of one group with several are not trained together.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._epoch = -1 if context.claims_after is None else context.claims_after

    def at_start(self) -> None:
        """Check under a supervisor, before anything is done.

        Raises:
            ConfigError: its trainer was started with another configuration, or with other files.
        """
        if self._context.claims_after is not None:
            self.compare(newest_claim(self._context.bus, self._context.worker))

    def of_heartbeat(self, beat: TrainerHeartbeat) -> None:
        """Check the claim of a living trainer, which may lie far back; raises as `at_start`."""
        if beat.epoch > self._epoch:
            self.compare(claim_at(self._context.bus, beat.claim_offset, self._context.worker))

    def compare(self, claim: TrainerStarted | None) -> None:
        """Compare with a claim, once for each; raises as `at_start`."""
        if claim is None or claim.epoch <= self._epoch:
            return
        self._epoch = claim.epoch
        context, role, here = self._context, self._context.role, host_name()
        if role != "prompts" and (problem := out_of_reach(claim, here)):
            raise ConfigError(f"{context.worker} on host {here}: {problem}")
        both = (
            f"{context.worker} on host {here} and the trainer on host {claim.host or '?'} "
            f"(epoch {claim.epoch}) do not run the same: "
        )
        config = context.config
        if found := disagreement(config, role, claim):
            raise ConfigError(f"{both}{found}; start every role of a run with one configuration")
        if found := other_files_text(context.files, claim.hashes):
            if config.run.on_changed_code == "refuse":
                raise ConfigError(f"{both}{found}; {AGAIN}")
            self._log.warning("changed_code", what=found)
        if found := other_release(claim):
            self._log.warning("other_release", what=found)


class ComparedRole(RoleAround):
    """A `Role` around a `Role`, which follows `steps` for claims.

    Consumes: `steps`, from a little before its end (TrainerStarted, TrainerHeartbeat).

    Raises:
        ConfigError: from `tick`: see `ClaimCheck`.
        OtherClaimError: the same, of a worker that joined: its next start reads the new claim.
    """

    def __init__(self, role: Role, context: Context) -> None:
        super().__init__(role)
        self._is_supervised = context.claims_after is not None
        self._is_joined = context.is_joined
        self._history = context.bus.ends(STEPS.name)[STEPS_PARTITION]
        start = {STEPS_PARTITION: max(0, self._history - TAIL)}
        self._reader = EventReader(context.bus, start, context.worker)
        self._check = ClaimCheck(context)
        self._next_s = 0.0

    def tick(self) -> None:
        """Look for claims now and then; then the role's own tick."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            try:
                for record in self._reader.poll(TAIL):
                    self._take(record.event, record.position)
            except ConfigError as err:
                if not self._is_joined:
                    raise
                raise OtherClaimError(f"{err}; joined anew, it has the new claim's") from err
            self._looked(now_s)
        super().tick()

    def close(self) -> None:
        """See `Role`."""
        self._reader.close()
        super().close()

    def _take(self, event: Event, position: Position) -> None:
        is_new = position.offset >= self._history
        if isinstance(event, TrainerStarted):
            if is_new or self._is_supervised:
                self._check.compare(event)
        elif isinstance(event, TrainerHeartbeat) and is_new and event.state != "done":
            self._check.of_heartbeat(event)

    def _looked(self, now_s: float) -> None:
        """Called after each look; for subclasses."""
