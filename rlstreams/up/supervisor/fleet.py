"""All workers of a run on this machine: started, reaped, restarted, killed, drained in order."""

from __future__ import annotations

import math
import signal
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.log.text import tail
from rlstreams.streams.process.cause import is_about_room, is_full
from rlstreams.streams.process.child import TAIL_LINES
from rlstreams.up.supervisor.progress import Progress
from rlstreams.up.supervisor.restart import Action, Decision, Exited, RestartPolicy, described
from rlstreams.up.supervisor.spawner import LIGHT_ROLES, Spawner, WorkerChild, WorkerSpec
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.runtime import Exit

LOGS = "logs"  # folder of the workers' logs, in the run's folder
RECENT = 16  # reaped instances of a worker that its next process is given
LOWER = {  # advice by role: the field that its memory grows with
    "trainer": "lower trainer.micro_batch_tokens, or give it more memory",
    "logprob": "lower logprob.token_budget, or give it more memory",
    "rollout": "lower rollout.slots, or give it more memory",
}
ELSE = "give it more memory"
GRACE_S = 10.0  # beyond drain_s, for a role's last commit and its exit


class FleetPlace:
    """A place in the fleet, taken by one process after another."""

    def __init__(self, role: str, ordinal: int, log: Path, room_s: float = 0.0) -> None:
        self.role = role
        self.ordinal = ordinal
        self.name = f"{role}-{ordinal}"
        self.log = log
        self.policy = RestartPolicy(
            self.name,
            f"{role}.{ordinal}",
            room_s,
            starts_slowly=role == "server",
            folder=log.parents[1],  # of `RUN/logs/ROLE-N.log`
        )
        self.child: WorkerChild | None = None
        self.restart_at_s: float | None = None
        self.is_awaited = False  # its restart was announced, its new process does not work yet
        self.num_starts = 0
        self.reaped: list[str] = []  # instances that we saw end without a rival, newest last
        self.excuse = ""  # why the end of the present process will be no failure of its own
        self.crash_at: list[str] = []  # armed in the processes to come, one in each
        self.last_status: int | None = None
        self.is_added = False  # while the run goes on: the run can do without it
        self.leaves_by_s: float | None = None  # it drains, and is not started again

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


class Fleet:
    """The workers. `tick` often; it never waits.

    Args:
        room_s: how long a worker that found the disk full waits for room; 0: for ever.
        claims_after: the newest epoch before the fleet's own trainers.
        server_urls: of the model servers that are among the workers.
    """

    def __init__(
        self,
        spawner: Spawner,
        folder: Path,
        counts: Mapping[str, int],
        *,
        progress: Progress,
        say: Callable[[str], None],
        room_s: float = 0.0,
        claims_after: int = 0,
        server_urls: Sequence[str] = (),
    ) -> None:
        self._spawner = spawner
        self._claims_after = claims_after
        self._server_urls = server_urls
        self._config = folder / "config.json"
        self._progress = progress
        self._say = say
        self._logs = folder / LOGS
        self._room_s = room_s
        self._logs.mkdir(parents=True, exist_ok=True)
        self.workers = [
            FleetPlace(role, ordinal, self._logs / f"{role}-{ordinal}.log", room_s)
            for role in ROLES
            for ordinal in range(counts.get(role, 0))
        ]
        self.num_killed = 0
        self.exits: list[Exited] = []
        self._replaced: list[WorkerChild] = []  # processes that sleep, or woke up and are to end
        self.failure: Failure | None = None
        self.is_draining = False  # nobody is restarted any more

    def start(self) -> None:
        """Start every worker; first those that need no fork, which waits for torch's import: a
        model server takes longest of all."""
        for worker in sorted(self.workers, key=lambda one: one.role not in LIGHT_ROLES):
            self._spawn(worker)

    def tick(self) -> None:
        """Reap what ended, and start again what should be."""
        now_s = time.monotonic()
        for child in tuple(self._replaced):
            if (status := child.poll()) is not None:
                self._replaced.remove(child)
                end = self._exited(child, status, now_s, "was replaced while suspended")
                self.exits.append(replace(end, was_replaced=True))
        for worker in tuple(self.workers):
            self._reap(worker, now_s)
            self._announce_start(worker)
            if worker.leaves_by_s is not None and worker.child and now_s >= worker.leaves_by_s:
                worker.leaves_by_s = math.inf
                self._say(f"{worker.name} did not drain in time: killed")
                worker.child.signal(signal.SIGKILL)
            if worker.restart_at_s is not None and now_s >= worker.restart_at_s:
                worker.restart_at_s = None
                if not self.is_draining:
                    self._spawn(worker)

    def add(self, role: str, ordinal: int) -> FleetPlace:
        """Start one more worker; the run goes on where it cannot work."""
        worker = FleetPlace(role, ordinal, self._logs / f"{role}-{ordinal}.log", self._room_s)
        worker.is_added = True
        # In the order of drains, as the others.
        at = [ROLES.index(one.role) for one in self.workers]
        self.workers.insert(bisect_right(at, ROLES.index(role)), worker)
        self._spawn(worker)
        return worker

    def retire(self, worker: FleetPlace, limit_s: float) -> None:
        """Have a worker drain, within `limit_s`; then it is none of the fleet."""
        worker.leaves_by_s, worker.restart_at_s = time.monotonic() + limit_s, None
        if worker.child is None:
            self.workers.remove(worker)
        else:
            worker.child.signal(signal.SIGTERM)

    def of(self, role: str) -> Sequence[FleetPlace]:
        """The workers of one role."""
        return [worker for worker in self.workers if worker.role == role]

    def is_done(self, role: str) -> bool:
        """Whether every worker of `role` ended as it should."""
        return all(
            w.child is None and w.restart_at_s is None and w.last_status == Exit.DONE
            for w in self.of(role)
        )

    def kill(self, worker: FleetPlace, crash_at: str = "") -> bool:
        """Send SIGKILL, as asked; False if no process is there to kill.

        Args:
            crash_at: crash point of its successor; see `streams.log.crash_points.arm_from`.
        """
        if worker.child is None or worker.child.poll() is not None:
            return False
        worker.excuse = "was killed as asked"
        worker.crash_at += [crash_at] if crash_at else []
        worker.child.signal(signal.SIGKILL)
        self.num_killed += 1
        return True

    def sleep(self, worker: FleetPlace) -> WorkerChild | None:
        """Send SIGSTOP and return the process; None if there is none. The caller sends SIGCONT."""
        if worker.child is None or worker.child.poll() is not None:
            return None
        worker.excuse = "was suspended and resumed as planned"
        worker.child.signal(signal.SIGSTOP)
        return worker.child

    def replace(self, worker: FleetPlace) -> None:
        """Start a successor beside the present process, which is to notice and end by itself."""
        if worker.child is not None:
            self._replaced.append(worker.child)
        worker.restart_at_s = None
        self._spawn(worker)

    @property
    def replaced(self) -> Sequence[WorkerChild]:
        """The processes that live on beside their successors."""
        return tuple(self._replaced)

    def child_of(self, instance: str) -> WorkerChild | None:
        """The process of this instance; None: it has ended, or is none of ours."""
        children = [*(worker.child for worker in self.workers), *self._replaced]
        return next((c for c in children if c is not None and c.spec.instance == instance), None)

    def excuse_all(self, why: str) -> None:
        """Excuse the end of every present process: a fault is about to hit what all depend on."""
        for worker in self.workers:
            if worker.child is not None:
                worker.excuse = worker.excuse or why

    def stop(self, role: str, number: signal.Signals) -> None:
        """Signal every worker of `role`; none of the fleet is restarted from here on."""
        self.is_draining = True
        for worker in self.of(role):
            worker.restart_at_s = None
            if worker.child is not None:
                worker.child.signal(number)

    def give_up(self, reason: str) -> None:
        """Note that the run cannot go on, although every worker works."""
        self.failure = self.failure or Failure(worker="", reason=reason, last_lines=())

    def is_gone(self, role: str) -> bool:
        """Whether no process of `role` is left."""
        return not any(worker.is_alive for worker in self.of(role))

    def saving(self, role: str) -> Sequence[str]:
        """The workers of `role` that write a checkpoint, by their last reports."""
        return [
            worker.name
            for worker in self.of(role)
            if worker.child is not None and self._progress.is_saving(worker.child.spec.instance)
        ]

    def close(self) -> None:
        """Kill what is left; idempotent."""
        for role in ROLES:
            self.stop(role, signal.SIGKILL)
        for child in self._replaced:
            child.signal(signal.SIGKILL)
        for worker in self.workers:
            if worker.child is not None and worker.child.wait(GRACE_S):
                worker.child = None
        self._replaced = [child for child in self._replaced if not child.wait(GRACE_S)]

    def _spawn(self, worker: FleetPlace) -> None:
        worker.excuse = ""
        spec = WorkerSpec(
            role=worker.role,
            ordinal=worker.ordinal,
            config=self._config,
            log=worker.log,
            instance=uuid.uuid4().hex,
            # An owner is known to be dead only if we saw it end. The process reads from the log
            # which instance owns the run at the time of its claim.
            reaped=tuple(worker.reaped[-RECENT:]),
            claims_after=self._claims_after,
            server_urls=self._server_urls,
            crash_at=worker.crash_at.pop(0) if worker.crash_at else "",
        )
        worker.child = self._spawner.spawn(spec)
        worker.num_starts += 1

    def _reap(self, worker: FleetPlace, now_s: float) -> None:
        child = worker.child
        status = None if child is None else child.poll()
        if child is None or status is None:
            return
        worker.child, worker.last_status = None, status
        if status != Exit.FENCED:  # a fenced one had a rival, who may own the run
            worker.reaped.append(child.spec.instance)
        died_at = "" if worker.excuse or status != -signal.SIGKILL else child.spec.crash_at
        if died_at:
            worker.excuse = f"died at {died_at} as asked"
            self.num_killed += 1
        if self.is_draining and status == -signal.SIGTERM:
            worker.excuse = worker.excuse or "was asked to end before it could listen"
        end = replace(self._exited(child, status, now_s, worker.excuse), died_at=died_at)
        self.exits.append(end)
        if worker.leaves_by_s is not None:
            self.workers.remove(worker)
            self._say(f"{worker.name} has left: {described(status)}")
        elif not self.is_draining:
            owners = worker.reaped if status == Exit.OWNER_ALIVE else ()
            decision = worker.policy.after(
                end,
                may_leave=self._may_leave(worker),
                is_owner_gone=any(map(self._progress.owns_run, owners)),
            )
            self._follow(worker, decision, end)
        elif status > 0:
            cause = end.cause or "no error"
            self._say(f"{worker.name} {described(status)} while it drained: {cause}")

    def _exited(self, child: WorkerChild, status: int, now_s: float, excuse: str) -> Exited:
        spec, cause = child.spec, ""
        if status != Exit.DONE and not excuse:  # otherwise its last error was not the cause
            cause = child.last_error()
        is_disk_full = is_about_room(cause)
        # Its error may have had no room either.
        if not is_disk_full and not excuse and status > 0 and is_full(self._logs):
            is_disk_full, cause = True, f"{cause}; the disk under {self._logs} is full".lstrip("; ")
        is_out_of_memory = not excuse and child.ran_out_of_memory()
        if is_out_of_memory:
            cause = f"the kernel ended it, memory ran out: {LOWER.get(spec.role, ELSE)}"
        return Exited(
            worker=spec.worker,
            instance=spec.instance,
            status=status,
            seen_s=now_s,
            excuse=excuse,
            uptime_s=now_s - child.started_s,
            committed=self._progress.committed(spec.instance),
            has_started=self._progress.has_started(spec.instance),
            cause=cause,
            is_disk_full=is_disk_full,
            is_out_of_memory=is_out_of_memory,
        )

    def _announce_start(self, worker: FleetPlace) -> None:
        """Say that a restarted process works, where its restart was announced."""
        child = worker.child
        if worker.is_awaited and child and self._progress.has_started(child.spec.instance):
            worker.is_awaited = False
            self._say(f"{worker.name} has started again")

    def _may_leave(self, worker: FleetPlace) -> bool:
        """Whether a good end is in order; that of a trainer before its target drains the run."""
        return worker.role == "trainer" or (worker.role == "prompts" and self._progress.at_target)

    def _follow(self, worker: FleetPlace, decision: Decision, end: Exited) -> None:
        if decision.action is Action.RESTART:
            again = f"again in {decision.delay_s:g} s" if decision.delay_s else "starting it again"
            self._say(f"{decision.reason}; {again}")
            worker.restart_at_s = end.seen_s + decision.delay_s
            worker.is_awaited = True
        elif decision.action is Action.STOP and worker.is_added:
            self.workers.remove(worker)
            self._say(f"{decision.reason}; the run goes on without it")
        elif decision.action is Action.STOP and self.failure is None:
            self.failure = Failure(
                worker=worker.name, reason=decision.reason, last_lines=tail(worker.log, TAIL_LINES)
            )


def num_workers(config: RunConfig) -> dict[str, int]:
    """Processes of a run, by role."""
    servers = config.num_started + bool(config.judge.model)
    return {role: config.num_workers(role) for role in ROLES} | {"server": servers}
