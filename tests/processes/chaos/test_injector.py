"""Carrying a plan out: real, small processes, and a log that the test writes.

That kills, crash points and several victims are struck and noted, `tests/chaos` says of whole runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rlstreams.schemas.events import Event
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import STEPS, WORKER_EVENTS, Topic
from rlstreams.up.supervisor.fault_hook import FaultHook, FaultTargets
from rlstreams.up.supervisor.fleet import Fleet
from rlstreams.up.supervisor.watcher import Watcher
from rlstreams.workers.config.run import RunConfig
from tests.chaos import injector as module
from tests.chaos.injector import FaultInjector
from tests.chaos.plan import AGENTS, BROKER, Fault, FaultKind, Journal
from tests.factories import step_completed, trainer_started, worker_report
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.proc import state_of
from tests.processes.supervisor.small import DEADLINE_S, Scripts, all_up, until

if TYPE_CHECKING:
    from rlstreams.up.supervisor.broker import BrokerKeeper

WAITS = (
    "import signal, sys, time; signal.signal(signal.SIGCONT, lambda *_: sys.exit(75)); "
    "print('up', flush=True)\n"
    "while True: time.sleep(0.02)"  # a signal right before `pause` would be lost
)


def fault(role: str, kind: FaultKind, wait_s: float = 0.0, **more: object) -> Fault:
    values = {"number": 0, "ordinal": 0, "stop_s": 0.0, **more}
    return Fault(role=role, kind=kind, wait_s=wait_s, **values)  # type: ignore[arg-type]


class Keeper:
    """What an injector uses of the broker's keeper."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def kill(self) -> bool:
        return True

    def signal(self, number: signal.Signals) -> bool:
        self.signals.append(number)
        return True


class Stage:
    """A fleet of two roles under a injector, with the log in the test's hand."""

    def __init__(self, folder: Path) -> None:
        log = made_log()
        self.bus = MemoryBus(log, "run")
        self.watcher = Watcher(self.bus, RunConfig(), is_live=False)
        self.spawner = Scripts({"rollout": WAITS, "trainer": WAITS})
        counts = {"rollout": 1, "trainer": 1}
        self.fleet = Fleet(
            self.spawner, folder, counts, progress=self.watcher.progress, say=self.watcher.say
        )

    def say(self, topic: Topic, *events: Event) -> None:
        with self.bus.producer("test") as producer:
            producer.commit([outgoing(topic, event) for event in events])
        self.watcher.catch_up()

    def begin(self, hook: FaultHook, keeper: Keeper | None = None) -> None:
        broker = cast("BrokerKeeper | None", keeper)
        hook.enter(FaultTargets(fleet=self.fleet, broker=broker, watcher=self.watcher))
        self.fleet.start()
        until(self.fleet, lambda: all_up(self.fleet))

    def until(self, hook: FaultHook, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s
            self.fleet.tick()
            hook.tick(is_running=True)
            time.sleep(0.002)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with _closing(stage.fleet):
        yield stage


@contextmanager
def _closing(fleet: Fleet) -> Iterator[None]:
    try:
        yield
    finally:
        fleet.close()


def injector(*faults: Fault) -> FaultInjector:
    return FaultInjector(Journal(planned=faults))


def test_a_broker_that_sleeps_is_woken(stage: Stage) -> None:
    keeper = Keeper()
    one = injector(fault(BROKER, FaultKind.STOP, stop_s=0.01))
    stage.begin(one, keeper)
    stage.until(one, lambda: bool(one.journal.woken_s))
    assert [signal.SIGSTOP, signal.SIGCONT] == keeper.signals


def test_an_agent_is_struck_once_there_is_one(stage: Stage) -> None:
    """Its processes are none of the fleet; until one is there the fault waits."""
    asked: list[int] = []

    def kill_agent(number: int) -> bool:
        asked.append(number)
        return len(asked) == 3

    journal = Journal(planned=[fault(AGENTS, FaultKind.KILL, number=7)])
    one = FaultInjector(journal, kill_agent=kill_agent)
    stage.begin(one)
    stage.until(one, lambda: bool(journal.injections))
    assert [7, 7, 7] == asked


def test_a_zombie_sleeps_until_its_successor_is_at_work(stage: Stage) -> None:
    """The planned time alone does not do: without a rival it would be no zombie."""
    one = injector(fault("rollout", FaultKind.ZOMBIE))
    stage.begin(one)
    stage.until(one, lambda: len(stage.spawner.started) == 3)
    old, successor = (spec for spec in stage.spawner.started if spec.role == "rollout")
    for _ in range(5):
        one.tick(is_running=True)
    assert {} == one.journal.woken_s
    stage.say(
        WORKER_EVENTS,
        *(
            worker_report(worker="rollout-0", role="rollout", instance=spec.instance)
            for spec in (old, successor)
        ),
    )
    stage.until(one, lambda: not stage.fleet.replaced)
    (exited,) = stage.fleet.exits
    assert (old.instance, 75, True) == (exited.instance, exited.status, exited.was_replaced)
    assert [old.instance] == list(one.journal.woken_s)


def test_a_trainer_sleeps_until_its_successor_has_claimed(stage: Stage) -> None:
    """Its claim is what makes the old epoch void."""
    one = injector(fault("trainer", FaultKind.ZOMBIE))
    stage.begin(one)
    stage.until(one, lambda: len(stage.spawner.started) == 3)
    assert () == stage.spawner.started[2].reaped
    stage.say(STEPS, trainer_started(epoch=2, instance=stage.spawner.started[2].instance))
    stage.until(one, lambda: not stage.fleet.replaced)
    assert 75 == stage.fleet.exits[0].status


def test_who_sleeps_is_woken_when_the_run_ends(stage: Stage) -> None:
    """A stopped process could not drain."""
    one = injector(fault("rollout", FaultKind.STOP, stop_s=1000.0))
    stage.begin(one)
    stage.until(one, lambda: bool(one.journal.injections))
    child = stage.fleet.of("rollout")[0].child
    stage.until(one, lambda: state_of(child.pid) == "T")
    one.tick(is_running=False)
    stage.until(one, lambda: bool(stage.fleet.exits))
    assert 75 == stage.fleet.exits[0].status


def test_a_fault_strikes_early_enough_for_all_to_fit(stage: Stage) -> None:
    """At its share of the steps, however long its time is still to come."""
    one = injector(*[fault("rollout", FaultKind.KILL, wait_s=1000.0)] * 2)
    stage.begin(one)
    stage.say(STEPS, trainer_started(step_target=6), step_completed(1))
    one.tick(is_running=True)
    assert [] == one.journal.injections
    stage.say(STEPS, step_completed(2))
    stage.until(one, lambda: len(one.journal.injections) == 1)
    one.tick(is_running=True)
    assert 1 == len(one.journal.injections)


def test_time_alone_cannot_stop_the_run(stage: Stage) -> None:
    """After a few faults the next one waits for a step."""
    kills = [fault("rollout", FaultKind.KILL)] * (module.FAULTS_PER_STEP + 1)
    one = injector(*kills)
    stage.begin(one)
    stage.say(STEPS, trainer_started(step_target=100))
    stage.until(one, lambda: len(one.journal.injections) == module.FAULTS_PER_STEP)
    stage.until(one, lambda: stage.fleet.of("rollout")[0].is_alive)
    one.tick(is_running=True)
    assert module.FAULTS_PER_STEP == len(one.journal.injections)
    stage.say(STEPS, step_completed(1))
    stage.until(one, lambda: len(one.journal.injections) == len(kills))


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_run_that_makes_no_step_is_given_up(stage: Stage, is_quiet: bool) -> None:
    """Not while a role is asleep; the last fault is named."""
    faults = [] if is_quiet else [fault("rollout", FaultKind.STOP, stop_s=0.3)]
    one = FaultInjector(Journal(planned=faults), stall_s=0.02)
    stage.begin(one)
    stage.until(one, lambda: stage.fleet.failure is not None)
    assert stage.fleet.failure is not None
    told = "no step for 0.03 s (1.5 x deadlines.stall_s) after step"
    assert told in stage.fleet.failure.reason
    assert len(faults) == len(one.journal.woken_s)
    assert ("the last fault: SIGSTOP to rollout-0" in stage.fleet.failure.reason) != is_quiet


def test_a_trainer_that_saves_after_the_last_step_is_not_given_up(stage: Stage) -> None:
    """No further step is to come."""
    stage.say(STEPS, trainer_started(step_target=1), step_completed(1))
    one = FaultInjector(Journal(planned=[]), stall_s=0.02)
    stage.begin(one)
    until_s = time.monotonic() + 0.2
    stage.until(one, lambda: time.monotonic() > until_s)
    assert stage.fleet.failure is None
