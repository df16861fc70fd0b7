"""What `up` does with a run that makes no step: what counts, what it asks, what it says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from rlstreams.schemas.events import ClosedGroups, Event
from rlstreams.show.health.stall_watch import (
    NO_FACTS,
    StallWatch,
    positions,
    worker_of,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, now_ms, outgoing
from rlstreams.streams.log.record import Committed, Outgoing, Partition
from rlstreams.streams.log.topics import (
    CONTROL,
    POLICY_VERSIONS,
    PROMPTS,
    STEPS,
    TOPICS,
    TRAJECTORIES,
    WORKER_EVENTS,
    Topic,
)
from rlstreams.streams.views.folds import Folds
from rlstreams.streams.views.stalls import BlockingTransaction
from rlstreams.words.screen import ProcessInfo
from rlstreams.workers.config.operation import DeadlinesSection
from rlstreams.workers.config.run import PromptsSection, RunConfig
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop.stall import StallClock
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus

STALL_S = 0.1
CONFIG = RunConfig(
    deadlines=DeadlinesSection(stall_s=STALL_S),
    trainer=TrainerSection(groups_per_step=1),
    prompts=PromptsSection(group_size=1),
)
TICK_S = 0.01  # of the test's own clock
LATER_S = 120.0


def test_only_time_in_which_a_step_was_to_be_expected_counts() -> None:
    """Not a pause, not what we slept ourselves; a step begins anew."""
    clock = StallClock()
    assert 0.0 == clock.tick(100.0, "step 1", counts=True)
    assert 0.5 == clock.tick(100.5, "step 1", counts=True)
    assert 0.5 == clock.tick(101.0, "step 1", counts=False)
    assert 1.5 == clock.tick(3600.0, "step 1", counts=True)
    assert 0.0 == clock.tick(3600.5, "step 2", counts=True)


class World:
    """A log with one group on its way, and the watch over it."""

    def __init__(
        self, config: RunConfig = CONFIG, held: tuple[BlockingTransaction, ...] = ()
    ) -> None:
        log = made_log()
        self.bus: Bus = MemoryBus(log, "run")
        self.folds = Folds()
        self.watch = StallWatch(
            config,
            self.folds,
            lambda: replace(NO_FACTS, committed=positions(self.bus), held=held),
            monotonic_s=lambda: self._now_s,
        )
        self._now_s = 0.0
        self._pen = self.bus.producer("pen")
        self._reader = self.bus.reader({p: 0 for t in TOPICS for p in self.bus.ends(t.name)})
        self.say(STEPS, factories.trainer_started())
        self.say(POLICY_VERSIONS, factories.policy_published(0))
        self.say(PROMPTS, factories.prompt(group_id="0", sample=0, group_size=1))
        for role in ("prompts", "rollout", "logprob", "trainer"):
            self.report(role, "waiting")

    def say(self, topic: Topic, event: Event) -> None:
        self._commit([outgoing(topic, event)])

    def report(self, role: str, state: str, at_ms: int | None = None) -> None:
        at_ms = now_ms() - round(2000 * STALL_S) if at_ms is None else at_ms
        report = factories.worker_report(
            worker=f"{role}-0", role=role, state=state, instance=role, at_ms=at_ms
        )
        self.say(WORKER_EVENTS, report)

    def _commit(self, records: list[Outgoing]) -> None:
        self._pen.commit(records)
        for raw in self._reader.poll(100, 0.0):
            self.folds.apply(decoded(raw).event, raw.position)

    def tick_until_told(self, *, is_running: bool = True) -> str:
        """The problem, or the news; "" if neither came."""
        until_s = time.monotonic() + LATER_S
        while not (self.watch.problem or self.watch.news) and time.monotonic() < until_s:
            self.tick(is_running=is_running)
            time.sleep(0)  # the facts are asked for in a thread
        return self.watch.problem or self.watch.news

    def tick_for(self, seconds: float, *, is_running: bool = True) -> str:
        """The problem after that time."""
        for _ in range(round(seconds / TICK_S)):
            self.tick(is_running=is_running)
        return self.watch.problem

    def tick(self, *, is_running: bool = True) -> None:
        self._now_s += TICK_S
        self.watch.tick(is_running=is_running)


@contextmanager
def scored_up_to(world: World, offset: int) -> Iterator[None]:
    """The log-prob group's position, committed with an output as it does."""
    with world.bus.producer("l") as producer, world.bus.consumer("logprob", ["trajectories"]) as it:
        it.poll(0, 0.0)
        at = {Partition(TRAJECTORIES.name, 0): Committed(offset=offset)}
        producer.commit([outgoing(CONTROL, factories.control_state())], at, it)
        yield


def test_a_trajectory_without_a_sample_is_the_fault_of_rollout() -> None:
    """The problem names the hop, and is what the run stops with."""
    world = World()
    told = world.tick_until_told()
    assert "blocked at rollout: rollout-0 says 'waiting'" in told
    assert "1 trajectory of group 0 is missing: 0/0 at prompts[0]@0" in told
    assert world.watch.is_unfed
    world.watch.begin_anew()
    assert "" == world.watch.problem
    assert "blocked at rollout" in world.tick_until_told()
    world.report("rollout", "working")
    world.watch.begin_anew()
    assert world.tick_until_told()
    assert not world.watch.is_unfed


def test_the_groups_positions_tell_logprob_from_the_trainer() -> None:
    """The same events, with and without a commit of the log-prob group."""
    world = World()
    world.say(TRAJECTORIES, factories.trajectory(group_id="0", sample=0, group_size=1))
    assert "blocked at logprob: logprob-0 says" in world.tick_until_told()
    world = World()
    world.say(TRAJECTORIES, factories.trajectory(group_id="0", sample=0, group_size=1))
    with scored_up_to(world, 1):
        assert "blocked at trainer: trainer-0 says" in world.tick_until_told()


def test_a_worker_that_stands_in_a_transaction_silences_the_others() -> None:
    """Their reports lie behind its records: neither the broker nor they are to blame."""
    held = BlockingTransaction(worker="logprob-0", transactional_id="run.logprob.0",
                partitions=("worker-events[0]",), age_s=9.0)  # fmt: skip
    world = World(held=(held,))
    assert world.tick_until_told().endswith(
        "blocked at logprob: logprob-0 has had a transaction open for 9 s, which blocks "
        "every reader of worker-events[0]"
    )
    ours, foreign, ending = "run.logprob.12", "other.logprob.0", "run.up"
    assert ["logprob-12", "", ""] == [worker_of(i, "run") for i in (ours, foreign, ending)]


def test_a_paused_run_and_a_redo_never_stall() -> None:
    """Neither does a run that `up` is draining, nor one without a limit."""
    paused, redoing, forever = World(), World(), World(RunConfig())
    paused.say(CONTROL, factories.control_state(state="paused"))
    redoing.say(STEPS, factories.heartbeat(state="redo"))
    assert ["", "", ""] == [world.tick_for(3 * STALL_S) for world in (paused, redoing, forever)]
    assert "" == World().tick_for(3 * STALL_S, is_running=False)
    assert "blocked at" in World().tick_until_told(), "nothing would have been noticed"


def test_a_redo_that_fell_silent_counts() -> None:
    """Nobody waits for a trainer that stands in the middle of its redo."""
    world = World()
    world.say(STEPS, factories.heartbeat(state="redo"))
    world.report("trainer", "starting", at_ms=now_ms())
    world.say(WORKER_EVENTS, factories.worker_report(
        worker="trainer-0", role="trainer", instance="second", at_ms=now_ms() - 9000
    ))  # fmt: skip
    assert "no report from trainer-0 for 9 s" in world.tick_until_told()
    world.watch.news = ""
    assert "blocked at" in world.tick_until_told()


def test_a_step_in_between_is_no_stall() -> None:
    world = World()
    for step in range(1, 6):
        assert "" == world.tick_for(STALL_S / 2)
        world.say(STEPS, factories.step_completed(step, closed=ClosedGroups(watermark=0)))
    assert "" == world.watch.problem


def test_after_the_last_step_idle_roles_do_not_stall() -> None:
    """The trainer writes its checkpoint, prompts has ended: that is said, and nothing stops."""
    patient = DeadlinesSection(stall_s=STALL_S, checkpoint_s=3600)
    world = World(replace(CONFIG, deadlines=patient))
    world.say(STEPS, factories.trainer_started(epoch=2, step_target=1))
    world.say(STEPS, factories.step_completed(1, epoch=2, closed=ClosedGroups(watermark=0)))
    world.say(POLICY_VERSIONS, factories.policy_published(1))
    world.report("prompts", "stopped", at_ms=now_ms())
    world.report("trainer", "saving", at_ms=now_ms())
    world.tick_for(STALL_S)
    time.sleep(2 * STALL_S)  # the trainer's report is dated by the real clock
    told = world.tick_until_told()
    assert "" == world.watch.problem
    assert told.startswith("the last step was 0 s ago, within its own deadline: trainer: ")


def test_a_restarted_worker_has_time_to_start() -> None:
    """Until it reports; and a process that is about to be started is not gone."""
    world = World()
    for instance, age_s in (("second", 5.0), ("", 0.0)):
        started_s = time.monotonic() - age_s
        world.watch.note([process("rollout-0", instance, started_s)])
        told = world.tick_until_told()
        assert re.search(r"rollout: rollout-0 was started \d+ s ago and has not reported", told)
        assert ("", True) == (world.watch.problem, world.watch.is_starting("rollout"))
        world.watch.news = ""
    world.watch.note([process("rollout-0", "rollout", time.monotonic())])  # it has reported
    assert "blocked at rollout: rollout-0 says" in world.tick_until_told()
    assert not world.watch.is_starting("rollout")
    world = World()
    world.watch.note([process("rollout-0", "", None)])
    assert "blocked at rollout: rollout-0 is not running" in world.tick_until_told()


def process(worker: str, instance: str, started_s: float | None) -> ProcessInfo:
    return ProcessInfo(
        worker=worker,
        role=worker[:-2],
        pid=1 if instance else None,
        is_alive=bool(instance),
        instance=instance,
        started_s=started_s,
    )


def test_silence_is_told_once() -> None:
    """Before the run has stood for long: a stopped process is nothing to reap."""
    world = World(RunConfig())
    world.report("logprob", "working", at_ms=now_ms() + 1)
    world.say(WORKER_EVENTS, factories.worker_report(
        worker="rollout-0", role="rollout", instance="second", at_ms=now_ms() - 8000
    ))  # fmt: skip
    assert "no report from rollout-0 for 8 s" == world.tick_until_told()
    world.watch.news = ""
    assert "" == world.tick_for(0.1) + world.watch.news


def test_what_was_said_of_a_wait_is_said_again_after_twice_the_time() -> None:
    """Its seconds alone are no news; another stage is."""
    world = World()
    world.report("rollout", "working", now_ms())
    said: list[tuple[float, str]] = []

    def tick_to(end_s: float) -> None:
        while world._now_s < end_s:
            world.tick()
            time.sleep(0)  # the facts are asked for in a thread
            if news := world.watch.news:
                said.append((world._now_s, news))
                world.watch.news = ""

    tick_to(40.0)
    assert 3 <= len(said) <= 10
    assert all(later[0] >= 1.9 * one[0] for one, later in pairwise(said))
    assert all("rollout-0" in text for _, text in said)
    num = len(said)
    with scored_up_to(world, 0):
        world.say(TRAJECTORIES, factories.trajectory(group_id="0", sample=0, group_size=1))
        world.report("rollout", "waiting")
        world.report("logprob", "working", now_ms())
        tick_to(60.0)
    assert num < len(said)
    assert "logprob" in said[num][1]
