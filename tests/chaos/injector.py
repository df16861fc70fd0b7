"""Carries a plan out on a running fleet, damages records, and keeps a journal of what happened."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.schemas import DecodeError, decode
from rlstreams.streams.log.bus import Bus, existing
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.record import Outgoing, RawRecord
from rlstreams.streams.log.topics import SCHEMAS, TOPICS
from rlstreams.up.supervisor.fault_hook import FaultTargets
from rlstreams.up.supervisor.fleet import FleetPlace
from rlstreams.up.supervisor.summary import show
from rlstreams.workers.bootstrap.parts import open_bus
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.stall import StallClock
from tests.chaos.plan import (
    AGENTS,
    BROKER,
    RECORDS,
    Fault,
    FaultKind,
    Injection,
    Journal,
    injected_by_step,
)
from tests.chaos.verdict import report

RECORDS_PER_TOPIC = 6
READ_S = 2.0


def damaged(value: bytes, draw: random.Random) -> bytes:
    """A record's value, damaged at random; what comes out may still be readable."""
    start, end = sorted((draw.randrange(len(value) + 1), draw.randrange(len(value) + 1)))
    kinds = (
        lambda: b"",
        lambda: value[:end],
        lambda: value[:10] + draw.randbytes(draw.randrange(200)),
        lambda: value[:start] + draw.randbytes(end - start) + value[end:],
        lambda: value[:start] + b"\xff" * 10 + value[start:],  # a length beyond all bounds
        lambda: value[:2] + draw.randbytes(8) + value[10:],  # a schema that nobody wrote
        lambda: b'{"a": 1}',
    )
    return draw.choice(kinds)()


class Vandal:
    """Writes damaged copies of a run's newest records into each of its topics but that of schemas,
    in a thread: the loop of `up` never waits for it."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._thread: threading.Thread | None = None
        self._written: set[int] = set()

    def strike(self, number: int) -> bool:
        """Whether the records of fault `number` are written; begins that if nobody did."""
        if number in self._written:
            return True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, args=(number,), daemon=True)
            self._thread.start()
        return False

    def _write(self, number: int) -> None:
        draw = random.Random(f"{self._seed}.{number}")
        with (
            suppress(StreamsError),  # the broker is away: it is tried again
            open_bus(self._config) as bus,
            bus.producer("vandal") as producer,
        ):
            for topic in existing(bus, TOPICS):
                newest = () if topic is SCHEMAS else _newest(bus, topic.name)
                producer.commit([_unreadable(raw, draw) for raw in newest])
            self._written.add(number)


def _newest(bus: Bus, topic: str) -> Sequence[RawRecord]:
    begins = bus.beginnings(topic)
    offsets = {
        partition: max(begins[partition], end - RECORDS_PER_TOPIC)
        for partition, end in bus.ends(topic).items()
    }
    with bus.reader(offsets) as reader:
        return reader.poll(100, READ_S)[-RECORDS_PER_TOPIC:]


def _unreadable(raw: RawRecord, draw: random.Random) -> Outgoing:
    """A copy that no decoder takes: what it would take is another event, and no damage."""
    value = bytes(raw.value)
    with suppress(DecodeError):
        while True:
            value = damaged(bytes(raw.value), draw)
            decode(value)
    return Outgoing(
        topic=raw.position.topic,
        key=raw.key,
        value=[value],
        headers=raw.headers,
        partition=raw.position.partition,
    )


if TYPE_CHECKING:
    from rlstreams.up.supervisor.fault_hook import EndedRun

PATIENCE_S = 10.0  # a victim that does not run for so long has its turn later
SUCCESSOR_S = 60.0  # longest sleep beyond the planned one, so that the successor is at work
FAULTS_PER_STEP = 4  # by time alone; more would stop the run by themselves
PATIENT = 1.5  # times `deadlines.stall_s`: the detector of `up` comes first, it knows the culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sleeper:
    fault: Fault
    instance: str  # "": the broker
    since_s: float
    worker: FleetPlace | None
    wake: Callable[[], object]


class FaultInjector:
    """A `FaultHook`: injects the planned faults while the run runs.

    Args:
        journal: with the plan.
        vandal: writes damaged records; None: there is no such fault.
        kill_agent: kills a process of an agent, by the number of its fault; returns whether there
            was one. None: there is no such fault.
        stall_s: without a step for somewhat longer the run is given up, though every stage makes
            progress; 0: never.
        json_file: for the report; "": none.
    """

    _targets: FaultTargets  # from `enter` on

    def __init__(
        self,
        journal: Journal,
        *,
        vandal: Vandal | None = None,
        kill_agent: Callable[[int], bool] | None = None,
        stall_s: float = 0.0,
        json_file: str = "",
    ) -> None:
        self.journal = journal
        self._vandal, self._kill_agent = vandal, kill_agent
        self._json_file = json_file
        self._limit_s, self._clock = PATIENT * stall_s, StallClock()
        self._sleepers: list[_Sleeper] = []
        self._first_step, self._step = 0, -1
        self._num_since_step = 0
        self._struck_s = self._due_since_s = 0.0

    def enter(self, targets: FaultTargets) -> None:
        """See `FaultHook`."""
        self._targets = targets
        self._first_step = targets.watcher.step
        self._struck_s = time.monotonic()

    def tick(self, *, is_running: bool) -> None:
        """See `FaultHook`."""
        now_s, step = time.monotonic(), self._targets.watcher.step
        for sleeper in [s for s in self._sleepers if not is_running or self._is_over(s, now_s)]:
            self._sleepers.remove(sleeper)
            sleeper.wake()
            self.journal.woken_s[sleeper.instance] = now_s
        if not is_running:
            return
        self._check_steps(now_s)
        if step > self._step:
            self._step, self._num_since_step = step, 0
        if self.journal.left and self._is_due(self.journal.left[0], now_s):
            self._try(now_s)

    def conclude(self, bus: Bus, ended: EndedRun, status: int) -> int:
        """See `FaultHook`; 0 only if the run is complete, every fault happened and no promise was
        broken."""
        targets = self._targets
        made = report(
            self.journal, ended, targets.watcher.state.run, targets.fleet.exits, time.monotonic()
        )
        show(*made.lines())
        if self._json_file:
            Path(self._json_file).write_text(made.to_json() + "\n", encoding="utf-8")
        return 0 if made.ok else 1

    def _check_steps(self, now_s: float) -> None:
        """Give the run up that made no step for too long since the last step or fault."""
        watcher, done = self._targets.watcher, self.journal.injections
        counts = watcher.stall.expects_step and not watcher.progress.at_target
        counts = counts and not self._sleepers
        waited_s = self._clock.tick(now_s, (watcher.step, len(done)), counts=counts)
        if 0 < self._limit_s <= waited_s:
            last = done[-1].fault.told if done else "none yet"
            self._targets.fleet.give_up(
                f"no step for {self._limit_s:g} s ({PATIENT:g} x deadlines.stall_s) after step "
                f"{watcher.step}; the last fault: {last}"
            )

    def _is_due(self, fault: Fault, now_s: float) -> bool:
        if now_s - self._struck_s >= fault.wait_s and self._num_since_step < FAULTS_PER_STEP:
            return True
        journal, watcher = self.journal, self._targets.watcher
        target = watcher.ledger.step_target
        number, total = len(journal.injections), len(journal.planned)
        limit = injected_by_step(number, total, self._first_step, target)
        return target > 0 and watcher.step >= max(limit, 1)

    def _try(self, now_s: float) -> None:
        """Strike, or wait for a victim that does not run; in the end the next one comes first."""
        left = self.journal.left
        fault, instance = left[0], self._strike(left[0])
        if instance is not None:
            left.popleft()
            step = self._targets.watcher.step
            self.journal.injections.append(Injection(fault=fault, instance=instance, step=step))
            self._num_since_step += 1
            self._struck_s, self._due_since_s = now_s, 0.0
            done, total = len(self.journal.injections), len(self.journal.planned)
            watcher = self._targets.watcher
            watcher.say(f"FAULT {done}/{total} after step {watcher.step}: {fault.told}")
        elif not self._due_since_s:
            self._due_since_s = now_s
        elif now_s - self._due_since_s > PATIENCE_S:
            left.rotate(-1)
            self._due_since_s = 0.0

    def _strike(self, fault: Fault) -> str | None:
        """The instance that was struck, "" for what is no worker; None: not now."""
        if fault.role == RECORDS:
            is_struck = self._vandal is not None and self._vandal.strike(fault.number)
        elif fault.role == AGENTS:
            is_struck = self._kill_agent is not None and self._kill_agent(fault.number)
        elif fault.role == BROKER:
            is_struck = self._strike_broker(fault)
        else:
            return self._strike_worker(fault)
        return "" if is_struck else None

    def _strike_worker(self, fault: Fault) -> str | None:
        fleet = self._targets.fleet
        worker = fleet.of(fault.role)[fault.ordinal]
        child = worker.child
        if child is None or any(s.instance == child.spec.instance for s in self._sleepers):
            return None
        if fault.kind in (FaultKind.KILL, FaultKind.POINT):
            if not fleet.kill(worker, fault.crash_at):
                return None
            self._targets.watcher.killed(worker.name)
        elif fleet.sleep(worker) is None:
            return None
        else:
            wake = partial(child.signal, signal.SIGCONT)
            self._sleep(fault, child.spec.instance, wake, worker)
            if fault.kind is FaultKind.ZOMBIE:
                fleet.replace(worker)
        return child.spec.instance

    def _strike_broker(self, fault: Fault) -> bool:
        keeper = self._targets.broker
        if keeper is None or any(s.worker is None for s in self._sleepers):
            return False
        if fault.kind is FaultKind.KILL:
            if not keeper.kill():
                return False
            self._targets.watcher.killed(BROKER)
        elif keeper.signal(signal.SIGSTOP):
            self._sleep(fault, "", partial(keeper.signal, signal.SIGCONT))
        else:
            return False
        # Who was in the middle of a commit may end with its outcome unknown, or fenced.
        self._targets.fleet.excuse_all("ended after the broker was struck as asked")
        return True

    def _sleep(
        self,
        fault: Fault,
        instance: str,
        wake: Callable[[], object],
        worker: FleetPlace | None = None,
    ) -> None:
        self._sleepers.append(
            _Sleeper(
                fault=fault, instance=instance, since_s=time.monotonic(), worker=worker, wake=wake
            )
        )

    def _is_over(self, sleeper: _Sleeper, now_s: float) -> bool:
        over_s = now_s - sleeper.since_s - sleeper.fault.stop_s
        if over_s < 0:
            return False
        if sleeper.fault.kind is not FaultKind.ZOMBIE or over_s > SUCCESSOR_S:
            return True
        # A zombie is one only if somebody else has taken over.
        assert sleeper.worker is not None, "a broker has no successor"
        successor = sleeper.worker.child
        if successor is None:
            return False
        instance, watcher = successor.spec.instance, self._targets.watcher
        if sleeper.worker.role == "trainer":
            return watcher.progress.owns_run(instance)
        return any(w.instance == instance for w in watcher.state.throughput.workers)
