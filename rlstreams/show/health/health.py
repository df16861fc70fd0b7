"""Health of a run in plain sentences, as `up` judges it, from the small topics alone.

Prompts and trajectories are not read, so `diagnose` names the blocked role from reports. Where it
names none, a role that starts, or reads the log again after a restart, is waited for, but only
as long as the longest piece of work may take: a role that starts, comes forward and dies, again and
again, is no excuse. Time is this process's own: clocks of other hosts may be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rlstreams.schemas import DecodeError, SchemaTexts
from rlstreams.schemas.binary import NO_TEXTS
from rlstreams.schemas.events import Event
from rlstreams.show.health.poison import PoisonWatch
from rlstreams.show.health.stall_watch import expects_step
from rlstreams.streams.log.codec import SteadyClock, decoded
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.parts import Assembler, Message
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.roles import STAGES
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    STEPS,
    WORKER_EVENTS,
)
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.folds import Folds
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.run import RunView
from rlstreams.streams.views.stalls import StallFacts, diagnose, told
from rlstreams.streams.workers import JOINING, SILENT_S
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.control import PAUSED
from rlstreams.workers.loop.stall import StallClock, limits_of

# Never those with payloads: prompts, trajectories, scored-trajectories.
SMALL = (STEPS, POLICY_VERSIONS, POLICY_PULLS, DEAD_LETTERS, WORKER_EVENTS, CONTROL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHealth:
    """Health of a run at one look."""

    problems: tuple[str, ...]
    state: str  # "reading", "running", "over", or what the run's control says
    step: int
    step_target: int
    policy_version: int
    since_last_step_s: float  # only time that counts
    unreadable: int  # records
    learning: str = ""  # what keeps it from learning, by its steps; no problem of its health


class HealthWatch:
    """Fed with events and ticked about twice a second; never waits.

    Args:
        config: of the run: its deadlines, and the share of dead letters that it allows.
        schemas: of the run's bus, for records of other releases.
        clock_ms: this host's; what is live is dated by it. It must not step.
        monotonic_s: the clock that waiting is counted by.
    """

    def __init__(
        self,
        config: RunConfig,
        schemas: SchemaTexts = NO_TEXTS,
        *,
        clock_ms: Callable[[], int] | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits_of(config)
        self._schemas = schemas
        self._assembler = Assembler()
        self._next: dict[Partition, int] = {}
        self._num_unreadable = 0
        self._clock_ms = clock_ms or SteadyClock()
        self._monotonic_s = monotonic_s
        self._folds = Folds(group_size=config.prompts.group_size)
        self._run = RunView(self._folds.ledger)
        self._poison = PoisonWatch(config, self._folds)
        self._clock = StallClock()
        self._live_s: float | None = None  # since when the log is read to its end
        self._live_ms = 0  # the same by the clock of the fold
        self._num_behind = -1  # offsets left of what lay there at the start; -1: not known

    def take(self, message: Message) -> None:
        """Take a record, or a part of one; an unreadable one is counted, its role dead-letters it.

        Messages taken before are skipped: with no committed offsets a client that had to join its
        group again begins anew.
        """
        if message.offset < self._next.get(message.partition, 0):
            return
        self._next[message.partition] = message.offset + 1
        raw = self._assembler.add(message)
        if raw is None:
            return
        try:
            event = decoded(raw, self._schemas).event
        except (DecodeError, StreamsError):  # the latter: its schema cannot be asked for
            self._num_unreadable += 1
        else:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Take one event. A live report is dated by our clock, an old one by its writer's."""
        if self._live_s is not None:
            self._folds.workers.passes(self._clock_ms())
        self._folds.apply(event)
        self._poison.apply(event)

    def tick(self, num_behind: int) -> None:
        """Count the time since the last tick.

        Args:
            num_behind: offsets that are left of what lay in the log when reading began.
        """
        now_s = self._monotonic_s()
        self._num_behind = num_behind
        if self._live_s is None and num_behind == 0:
            self._live_s = now_s
            self._folds.workers.passes(self._clock_ms())
            self._live_ms = self._folds.workers.clock_ms
        state = self._folds
        counts = self._live_s is not None and expects_step(state) and not state.ledger.at_target
        # Only a step begins anew: a trainer that crashes again and again claims the run each time.
        self._clock.tick(now_s, state.ledger.last_step, counts=counts)

    def look(self) -> RunHealth:
        """Judge the run as of now."""
        state = self._folds
        phase = "over" if state.ledger.at_target else state.control
        return RunHealth(
            problems=tuple(self._problems(state)),
            state="reading" if self._live_s is None else phase,
            step=state.ledger.last_step,
            step_target=state.ledger.step_target,
            policy_version=state.ledger.policy_version,
            since_last_step_s=round(self._clock.waited_s, 1),
            unreadable=self._num_unreadable,
            learning=str(hindrance(ViewState(run=self._run.state)) or ""),
        )

    def _silent_s(self) -> dict[str, float]:
        """Seconds since the last report of each silent worker, by worker."""
        if self._live_s is None or self._monotonic_s() - self._live_s <= SILENT_S:
            return {}  # live workers have not had the time to report
        self._folds.workers.passes(self._clock_ms())
        now = self._folds.workers.clock_ms
        return {
            worker.worker: age_s
            for worker in self._folds.workers.all
            if worker.state not in ("stopped", JOINING)
            and (age_s := (now - worker.heard_ms) / 1000) > SILENT_S
        }

    def _problems(self, state: Folds) -> list[str]:
        if self._live_s is None:
            left = "" if self._num_behind < 0 else f": {self._num_behind} offsets are left"
            return [f"the log has not been read to its end yet{left}"]
        silent = self._silent_s()
        reporting = [worker for worker in state.workers.all if worker.state != "stopped"]
        is_all = len(silent) == len(reporting) > 1
        found = []
        if 0 < self._limits.stall_s <= self._clock.waited_s:
            found += self._stall(state, names_role=not is_all)
        if is_all:
            found.append(
                f"no worker has reported for {min(silent.values()):.0f} s: the broker does not "
                "accept or deliver records, or every role is gone"
            )
        else:
            found += [f"no report from {w} for {age_s:.0f} s" for w, age_s in silent.items()]
        if state.control == PAUSED and state.why_control:
            found.append(f"paused: {state.why_control}")
        if self._poison.problem and not state.ledger.at_target:
            found.append(self._poison.problem)
        return found

    def _stall(self, state: Folds, *, names_role: bool) -> list[str]:
        waited_s = self._clock.waited_s
        since = f"no step for {waited_s:.0f} s (the last was {state.ledger.last_step})"
        if not names_role:
            return [since]
        evidence = StallFacts(
            now_ms=self._clock_ms(), waited_s=waited_s, has_samples=False, since_ms=self._live_ms
        )
        if found := diagnose(state, evidence, self._limits):
            return [f"{since}: blocked at {found.hop}: {found.sentence}"]
        limits = self._limits
        longest_s = max(limits.start_s, limits.sample_s, limits.pull_s)
        is_saving = any(worker.state == "saving" for worker in state.workers.all)  # it has longer
        if is_saving or waited_s < limits.stall_s + longest_s:
            return []
        everybody = "; ".join(told(state, evidence, limits, role) for role in STAGES)
        return [f"{since}: no role says that it is stuck: {everybody}"]
