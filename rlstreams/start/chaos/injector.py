"""Carries a plan out on a running fleet, and keeps a journal of what really happened."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.start.chaos.damage import Vandal, filled
from rlstreams.start.chaos.plan import (
    BROKER,
    DISK,
    RECORDS,
    SERVER,
    UP,
    Conclude,
    Fault,
    FaultKind,
    Injection,
    Journal,
    Struck,
    injected_by_step,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.up.supervisor.child import Child
from rlstreams.up.supervisor.fault_hook import FaultTargets
from rlstreams.up.supervisor.fleet import Worker
from rlstreams.up.supervisor.stall_watch import StallClock
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.process import pid_file

if TYPE_CHECKING:
    from rlstreams.up.supervisor.fault_hook import Ended

PATIENCE_S = 10.0  # a victim that does not run for so long has its turn later
SUCCESSOR_S = 60.0  # longest sleep beyond the planned one, so that the successor is at work
FAULTS_PER_STEP = 4  # by time alone; more would stop the run by themselves
PATIENT = 1.5  # times `deadlines.stall_s`: the detector of `up` comes first, it knows the culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doomed:
    """Whose successor is to be killed too."""

    fault: Fault
    worker: Worker | None  # None: the broker
    instance: str  # that was killed first
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sleeper:
    injection: Injection
    worker: Worker | None = None  # None: the broker
    child: Child | None = None
    ballast: Path | None = None  # that fills the broker's disk


class FaultInjector:
    """A `FaultHook`: injects the planned faults while the run runs.

    Args:
        faults: in the order in which they strike; those of kind ARMED wait in their workers, each
            process of which is started with the next one.
        before: what an `up` that was killed as planned left; this one goes on with its plan.
        state_file: where that is left; without one `up` itself cannot be struck.
        vandal: writes damaged records; None: there is no such fault.
        folder: whose disk is filled.
        stall_s: without a step for somewhat longer the run is given up, though every stage makes
            progress; 0: never.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        conclude: Conclude,
        *,
        before: Struck | None = None,
        state_file: Path | None = None,
        vandal: Vandal | None = None,
        folder: Path = Path(),
        stall_s: float = 0.0,
    ) -> None:
        self._before = before or Struck(journal=Journal(planned=faults), left=faults)
        self._state_file = state_file
        self._vandal = vandal
        self._folder = folder
        self.journal = self._before.journal
        self._left = deque(f for f in self._before.left if f.kind is not FaultKind.ARMED)
        self._doomed: list[_Doomed] = []
        self._limit_s, self._clock = PATIENT * stall_s, StallClock()
        self._num_exits = 0  # that were read
        self._conclude = conclude
        self._sleepers: list[_Sleeper] = []
        self._targets: FaultTargets | None = None
        self._first_step = 0
        self._step = -1
        self._num_since_step = 0
        self._struck_s = self._due_since_s = 0.0

    def enter(self, targets: FaultTargets) -> None:
        """See `FaultHook`."""
        self._targets = targets
        first_step = self._before.first_step
        self._first_step = targets.watcher.step if first_step is None else first_step
        self._struck_s = time.monotonic()
        for fault in self._armed():
            targets.fleet.of(fault.role)[fault.ordinal].crash_at.append(fault.crash_at)

    def tick(self, *, is_running: bool) -> None:
        """See `FaultHook`."""
        targets = self._targets
        assert targets is not None, "tick before enter"
        now_s = time.monotonic()
        self._note_armed(targets)
        for sleeper in [s for s in self._sleepers if not is_running or self._is_over(s, now_s)]:
            self._wake(sleeper, now_s)
        if not is_running:
            return
        for doomed in list(self._doomed):
            if self._kill_successor(doomed, targets, now_s):
                self._doomed.remove(doomed)
        self._check_steps(targets)
        if targets.watcher.step > self._step:
            self._step, self._num_since_step = targets.watcher.step, 0
        if self._left and self._is_due(self._left[0], targets, now_s):
            self._try(targets, now_s)

    def conclude(self, bus: Bus, ended: Ended, status: int) -> int:
        """See `FaultHook`."""
        assert self._targets is not None, "conclude before enter"
        return self._conclude(bus, ended, status, self.journal, self._targets)

    def _armed(self) -> list[Fault]:
        return [fault for fault in self.journal.planned if fault.kind is FaultKind.ARMED]

    def _note_armed(self, targets: FaultTargets) -> None:
        """What died at its crash point."""
        for exited in targets.fleet.exits[self._num_exits :]:
            for fault in self._armed():
                if (fault.victim, fault.crash_at) == (exited.worker, exited.died_at):
                    self.journal.injections.append(self._record(fault, exited.instance, targets))
        self._num_exits = len(targets.fleet.exits)

    def _check_steps(self, targets: FaultTargets) -> None:
        """Give the run up that made no step for too long since the last step or fault."""
        watcher, done = targets.watcher, self.journal.injections
        counts = watcher.stall.expects_step and not watcher.progress.at_target
        counts = counts and not self._sleepers
        waited_s = self._clock.tick(time.monotonic(), (watcher.step, len(done)), counts=counts)
        if 0 < self._limit_s <= waited_s:
            last = done[-1].fault.told if done else "none yet"
            targets.fleet.give_up(
                f"no step for {self._limit_s:g} s ({PATIENT:g} x deadlines.stall_s) after step "
                f"{watcher.step}; the last fault: {last}"
            )

    def _is_due(self, fault: Fault, targets: FaultTargets, now_s: float) -> bool:
        if now_s - self._struck_s >= fault.wait_s and self._num_since_step < FAULTS_PER_STEP:
            return True
        watcher = targets.watcher
        number = len(self.journal.injections)
        limit = injected_by_step(
            number, len(self.journal.planned), self._first_step, watcher.ledger.step_target
        )
        return watcher.ledger.step_target > 0 and watcher.step >= max(limit, 1)

    def _try(self, targets: FaultTargets, now_s: float) -> None:
        fault = self._left[0]
        injection = self._inject(fault, targets)
        if injection is not None:
            self._left.popleft()
            self.journal.injections.append(injection)
            self._num_since_step += 1
            self._struck_s, self._due_since_s = now_s, 0.0
            number, total = len(self.journal.injections), len(self.journal.planned)
            targets.watcher.say(f"FAULT {number}/{total} after step {injection.step}: {fault.told}")
        elif not self._due_since_s:
            self._due_since_s = now_s
        elif now_s - self._due_since_s > PATIENCE_S:
            self._left.rotate(-1)
            self._due_since_s = 0.0

    def _inject(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        strikes = {
            UP: self._inject_up,
            BROKER: self._inject_broker,
            DISK: self._inject_disk,
            SERVER: self._inject_elsewhere,
            RECORDS: self._inject_elsewhere,
        }
        is_several = fault.kind is FaultKind.SEVERAL and fault.role != UP
        strike = self._inject_several if is_several else strikes.get(fault.role)
        return (strike or self._inject_worker)(fault, targets)

    def _inject_elsewhere(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        """What is no process of the fleet's: a model server, or the log."""
        if fault.role == SERVER:
            is_struck = kill_server(targets.fleet.of("rollout")[fault.ordinal].log, fault.ordinal)
        else:
            is_struck = self._vandal is not None and self._vandal.strike(fault.number)
        return self._record(fault, "", targets) if is_struck else None

    def _inject_worker(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        worker = targets.fleet.of(fault.role)[fault.ordinal]
        child = worker.child
        if child is None or any(s.child is child for s in self._sleepers):
            return None
        injection = self._record(fault, child.spec.instance, targets)
        if fault.kind in (FaultKind.KILL, FaultKind.POINT, FaultKind.AGAIN):
            if not targets.fleet.kill(worker, fault.crash_at):
                return None
            targets.watcher.killed(worker.name)
            if fault.kind is FaultKind.AGAIN:
                self._doom(injection, worker)
            return injection
        if targets.fleet.sleep(worker) is None:
            return None
        self._sleepers.append(_Sleeper(injection=injection, worker=worker, child=child))
        if fault.kind is FaultKind.ZOMBIE:
            targets.fleet.replace(worker)
        return injection

    def _inject_disk(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        if self._sleepers or self._doomed:
            return None
        injection = self._record(fault, "", targets)
        self._sleepers.append(_Sleeper(injection=injection, ballast=filled(self._folder)))
        targets.fleet.excuse_all("ended after the disk was filled as asked")
        return injection

    def _inject_broker(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        keeper = targets.broker
        if keeper is None or any(s.worker is None for s in self._sleepers):
            return None
        injection = self._record(fault, "", targets)
        if fault.kind in (FaultKind.KILL, FaultKind.AGAIN):
            if not self._kill_broker(targets, injection.at_s):
                return None
            if fault.kind is FaultKind.AGAIN:
                self._doom(injection, None)
        elif keeper.signal(signal.SIGSTOP):
            self._sleepers.append(_Sleeper(injection=injection))
        else:
            return None
        # Who was in the middle of a commit may end with its outcome unknown, or fenced.
        targets.fleet.excuse_all("ended after the broker was struck as asked")
        return injection

    def _kill_broker(self, targets: FaultTargets, at_s: float) -> bool:
        if targets.broker is None or not targets.broker.kill():
            return False
        self.journal.broker_kills_s.append(at_s)
        targets.watcher.killed(BROKER)
        return True

    def _doom(self, injection: Injection, worker: Worker | None) -> None:
        self._doomed.append(
            _Doomed(
                fault=injection.fault,
                worker=worker,
                instance=injection.instance,
                since_s=injection.at_s,
            )
        )

    def _kill_successor(self, doomed: _Doomed, targets: FaultTargets, now_s: float) -> bool:
        """Whether that is done: the successor has its age, and was killed."""
        if doomed.worker is None:
            keeper = targets.broker
            assert keeper is not None, "the broker was killed before"
            seen_s = keeper.last_death_seen_s
            is_due = seen_s > doomed.since_s and now_s - seen_s >= doomed.fault.again_s
            return is_due and self._kill_broker(targets, now_s)
        child = doomed.worker.child
        if child is None or child.spec.instance == doomed.instance:
            return False
        is_due = now_s - child.started_s >= doomed.fault.again_s
        return is_due and targets.fleet.kill(doomed.worker)

    def _inject_several(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        """All at one instant; who sleeps is left alone."""
        roles = {fault.role, *fault.others}
        asleep = {id(s.child) for s in self._sleepers}
        if BROKER in roles and any(s.worker is None for s in self._sleepers):
            return None
        workers = [
            w for w in targets.fleet.workers if w.role in roles and id(w.child) not in asleep
        ]
        first = next((w.child for w in workers if w.name == fault.victim and w.child), None)
        injection = self._record(fault, first.spec.instance if first else "", targets)
        if BROKER in roles and self._kill_broker(targets, injection.at_s):
            targets.fleet.excuse_all("ended after the broker was struck as asked")
        struck = [worker for worker in workers if targets.fleet.kill(worker)]
        for worker in struck:
            targets.watcher.killed(worker.name)
        return injection if struck else None

    def _inject_up(self, fault: Fault, targets: FaultTargets) -> Injection | None:
        """The end of this process, once its plan is written down; nobody may be asleep, for nobody
        else would wake him."""
        if self._state_file is None or self._sleepers or self._doomed or targets.fleet.replaced:
            return None
        injection = self._record(fault, "", targets)
        self._left.popleft()
        self.journal.injections.append(injection)
        children = [worker.child for worker in targets.fleet.workers if worker.child]
        num_killed = targets.fleet.num_killed + self._before.num_killed + 1
        struck = Struck(
            journal=self.journal,
            left=tuple(self._left),
            first_step=self._first_step,
            exits=(*self._before.exits, *targets.fleet.exits),
            num_killed=num_killed + (len(children) if fault.others else 0),
        )
        self._state_file.write_bytes(pickle.dumps(struck))
        if BROKER in fault.others and targets.broker is not None:
            targets.broker.kill()
        for child in children if fault.others else ():
            child.signal(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL is not survived")

    def _record(self, fault: Fault, instance: str, targets: FaultTargets) -> Injection:
        return Injection(
            fault=fault,
            instance=instance,
            step=targets.watcher.step,
            at_s=time.monotonic(),
            at_ms=now_ms(),
        )

    def _is_over(self, sleeper: _Sleeper, now_s: float) -> bool:
        over_s = now_s - sleeper.injection.at_s - sleeper.injection.fault.stop_s
        if over_s < 0:
            return False
        if sleeper.injection.fault.kind is not FaultKind.ZOMBIE or over_s > SUCCESSOR_S:
            return True
        # A zombie is one only if somebody else has taken over.
        assert self._targets is not None
        assert sleeper.worker is not None, "a broker has no successor"
        successor = sleeper.worker.child
        if successor is None:
            return False
        instance, watcher = successor.spec.instance, self._targets.watcher
        if sleeper.worker.role == "trainer":
            return watcher.progress.owns_run(instance)
        return any(w.instance == instance for w in watcher.state.throughput.workers)

    def _wake(self, sleeper: _Sleeper, now_s: float) -> None:
        assert self._targets is not None
        self._sleepers.remove(sleeper)
        if sleeper.child is not None:
            sleeper.child.signal(signal.SIGCONT)
        elif self._targets.broker is not None:
            if sleeper.ballast is not None:
                sleeper.ballast.unlink()
            else:
                self._targets.broker.signal(signal.SIGCONT)
        self.journal.woken_s[sleeper.injection.instance] = now_s


def kill_server(worker_log: Path, ordinal: int) -> bool:
    """SIGKILL; False if no server runs now: it is being started again, or not ours.

    Args:
        worker_log: of the rollout worker that minds it; its server's log lies beside it.
    """
    for kind in Kind:
        path = pid_file(worker_log.with_name(f"{kind}-{ordinal}.log"))
        try:
            os.kill(int(path.read_text(encoding="ascii")), signal.SIGKILL)
        except (FileNotFoundError, ValueError, ProcessLookupError):
            continue  # none, or its guard is about to write or remove the file
        return True
    return False
