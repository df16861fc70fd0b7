"""All workers of a run on this machine: started, reaped, restarted, killed, drained in order."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.runtime import Exit
from workers.supervisor.child import Child, ChildSpec, Spawner, log_tail
from workers.supervisor.restart import Action, Decision, RestartPolicy

# Who is drained first: nobody waits for work of somebody who has left.
DRAIN_ORDER = ("prompts", "rollout", "logprob", "trainer")
GRACE_S = 10.0  # beyond drain_s, for a role's last commit and its exit


class Witness(Protocol):
    """What the log says about a process."""

    def committed(self, instance: str) -> bool:
        """Whether it committed anything of its work."""

    def owns_run(self, instance: str) -> bool:
        """Whether the newest trainer's claim is its."""


class Worker:
    """A place in the fleet, taken by one process after another."""

    def __init__(self, role: str, ordinal: int, log: Path) -> None:
        self.role = role
        self.ordinal = ordinal
        self.name = f"{role}-{ordinal}"
        self.log = log
        self.policy = RestartPolicy(self.name, f"{role}.{ordinal}")
        self.child: Child | None = None
        self.restart_at_s: float | None = None
        self.num_starts = 0
        self.takeover = False
        self.is_kill_ours = False
        self.last_status: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a process runs, as of the last reaping."""
        return self.child is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the run cannot go on."""

    worker: str  # "": none of them alone
    reason: str
    last_lines: Sequence[str]
    status: int


class Fleet:
    """The workers. `tick` often; it never waits."""

    def __init__(
        self,
        spawner: Spawner,
        folder: Path,
        counts: Mapping[str, int],
        *,
        witness: Witness,
        say: Callable[[str], None],
    ) -> None:
        self._spawner = spawner
        self._config = folder / "config.json"
        self._witness = witness
        self._say = say
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.workers = [
            Worker(role, ordinal, self._logs / f"{role}-{ordinal}.log")
            for role in DRAIN_ORDER
            for ordinal in range(counts.get(role, 0))
        ]
        self.num_killed = 0
        self.failure: Failure | None = None
        self.is_draining = False  # nobody is restarted any more

    def start(self) -> None:
        """Start every worker."""
        for worker in self.workers:
            self._spawn(worker)

    def tick(self) -> None:
        """Reap what ended, and start again what should be."""
        now_s = time.monotonic()
        for worker in self.workers:
            self._reap(worker, now_s)
            if worker.restart_at_s is not None and now_s >= worker.restart_at_s:
                worker.restart_at_s = None
                if not self.is_draining:
                    self._spawn(worker)

    def of(self, role: str) -> Sequence[Worker]:
        """The workers of one role."""
        return [worker for worker in self.workers if worker.role == role]

    def is_done(self, role: str) -> bool:
        """Whether every worker of `role` ended as it should."""
        return all(w.child is None and w.last_status == Exit.DONE for w in self.of(role))

    def kill(self, worker: Worker) -> bool:
        """SIGKILL, by somebody's wish; False if no process is there to kill."""
        if worker.child is None or worker.child.poll() is not None:
            return False
        worker.is_kill_ours = True
        worker.child.signal(signal.SIGKILL)
        self.num_killed += 1
        return True

    def stop(self, role: str, number: signal.Signals) -> None:
        """Signal every worker of `role`; none of the fleet is restarted from here on."""
        self.is_draining = True
        for worker in self.of(role):
            worker.restart_at_s = None
            if worker.child is not None:
                worker.child.signal(number)

    def give_up(self, reason: str) -> None:
        """Every worker works, and yet the run cannot go on."""
        self.failure = self.failure or Failure(worker="", reason=reason, last_lines=(), status=1)

    def is_gone(self, role: str) -> bool:
        """Whether no process of `role` is left."""
        return not any(worker.is_alive for worker in self.of(role))

    def close(self) -> None:
        """Kill what is left; idempotent."""
        for role in DRAIN_ORDER:
            self.stop(role, signal.SIGKILL)
        for worker in self.workers:
            if worker.child is not None and worker.child.wait(GRACE_S):
                worker.child = None

    def _spawn(self, worker: Worker) -> None:
        worker.is_kill_ours = False
        spec = ChildSpec(
            role=worker.role,
            ordinal=worker.ordinal,
            config=self._config,
            log=worker.log,
            instance=uuid.uuid4().hex,
            takeover=worker.takeover,
        )
        worker.child = self._spawner.spawn(spec)
        worker.num_starts += 1

    def _reap(self, worker: Worker, now_s: float) -> None:
        child = worker.child
        status = None if child is None else child.poll()
        if child is None or status is None:
            return
        worker.child = None
        worker.last_status = status
        instance = child.spec.instance
        # Only of an owner that we saw end do we know that it is dead; a fenced one had a rival.
        worker.takeover = status != Exit.FENCED and self._witness.owns_run(instance)
        if self.is_draining:
            return
        decision = (
            worker.policy.killed()
            if worker.is_kill_ours
            else worker.policy.ended(
                status,
                now_s=now_s,
                uptime_s=now_s - child.started_s,
                committed=self._witness.committed(instance),
            )
        )
        self._follow(worker, decision, status, now_s)

    def _follow(self, worker: Worker, decision: Decision, status: int, now_s: float) -> None:
        if decision.action is Action.RESTART:
            again = f"again in {decision.delay_s:g} s" if decision.delay_s else "starting it again"
            self._say(f"{decision.reason}; {again}")
            worker.restart_at_s = now_s + decision.delay_s
        elif decision.action is Action.STOP and self.failure is None:
            self.failure = Failure(
                worker=worker.name,
                reason=decision.reason,
                last_lines=log_tail(worker.log),
                status=status,
            )


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
