"""While a transaction is under way, a stage's loop collects what finishes and does not poll."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import FencedError
from rlstreams.streams.log.record import Committed, Outgoing, Partition
from rlstreams.streams.log.topics import PROMPTS, WORKER_EVENTS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import StageLoop
from tests import factories
from tests.memory.bus import Ended, MemoryBus, MemoryProducer
from tests.memory.log import Fault, MemoryLog
from tests.unit.roles.stand import tick_until
from tests.unit.workers.test_stage import HeldStage, issue, make_log, outputs, read


class Held:
    """A commit that a test lets go on."""

    def __init__(self, commit: Callable[[], object]) -> None:
        self._commit = commit
        self._ended: Ended | None = None

    def go_on(self) -> None:
        self._ended = Ended(self._commit)

    def wait(self, timeout_s: float) -> bool:
        return self._ended is not None

    def result(self) -> None:
        self._ended.result()


class SlowProducer(MemoryProducer):
    """Outputs that it starts are under way until a test lets them go on."""

    held: list[Held]

    def start(
        self,
        records: Sequence[Outgoing],
        consumed: Mapping[Partition, Committed] | None = None,
        consumer: Any = None,
    ) -> Any:
        if not records:  # a note
            return super().start(records, consumed, consumer)
        self.held.append(Held(lambda: self.commit(records, consumed, consumer)))
        return self.held[-1]


class SlowBus(MemoryBus):
    """Keeps the commits that were started."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log, "run")
        self.held: list[Held] = []

    def producer(self, transactional_id: str) -> SlowProducer:
        producer = SlowProducer(self._log, "run", f"run.{transactional_id}", self._part_bytes)
        producer.held = self.held
        return producer


def started(
    *names: str, stage: HeldStage | None = None
) -> tuple[MemoryLog, HeldStage, SlowBus, StageLoop]:
    """A loop that has begun the samples `names`."""
    log, stage = make_log(), stage or HeldStage()
    issue(log, *names)
    bus = SlowBus(log)
    context = Context(config=RunConfig(), bus=bus, role="rollout", ordinal=0, instance="i")
    loop = StageLoop(context, bus, stage, PROMPTS.name, reporter=Reporter(context), interval_s=0.0)
    tick_until(loop, lambda: sorted(stage.begun) == sorted(names))
    return log, stage, bus, loop


def test_nothing_is_polled_until_it_has_ended() -> None:
    """A poll could take part in a rebalance that the transaction knows nothing of."""
    log, stage, bus, loop = started("0/0")
    stage.released = ["0/0"]
    tick_until(loop, lambda: len(bus.held) == 1)
    issue(log, "1/0")
    for _ in range(5):
        loop.tick()
    assert stage.begun == {}
    bus.held[0].go_on()
    tick_until(loop, lambda: list(stage.begun) == ["1/0"])


def test_an_abort_is_told_when_it_has_ended_and_sent_again() -> None:
    """And so is what finished meanwhile."""
    log, stage, bus, loop = started("0/0", "0/1")
    log.fail_next_commit("run.rollout.0", Fault.BEFORE)
    stage.released = ["0/0"]
    tick_until(loop, lambda: len(bus.held) == 1)
    stage.released = ["0/1"]
    loop.tick()
    bus.held[0].go_on()
    tick_until(loop, lambda: len(bus.held) == 2)
    assert outputs(log) == []
    bus.held[1].go_on()
    tick_until(loop, lambda: outputs(log) == ["0/0", "0/1"])


class Telling(HeldStage):
    """Announces what a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_tell: list[Outgoing] = []

    def announcements(self) -> Sequence[Outgoing]:
        told, self.to_tell = self.to_tell, []
        return told


def test_what_is_announced_meanwhile_goes_out_with_what_finished_meanwhile() -> None:
    """A trajectory may name a load that was announced while the last transaction was under way."""
    log, stage, bus, loop = started("0/0", "0/1", stage=(telling := Telling()))
    stage.released = ["0/0"]
    tick_until(loop, lambda: len(bus.held) == 1)
    telling.to_tell = [outgoing(WORKER_EVENTS, factories.worker_report())]
    stage.released = ["0/1"]
    loop.tick()
    bus.held[0].go_on()
    tick_until(loop, lambda: len(bus.held) == 2)
    assert len(read(bus, WORKER_EVENTS.name)) == 0
    bus.held[1].go_on()
    tick_until(loop, lambda: outputs(log) == ["0/0", "0/1"])
    assert len(read(bus, WORKER_EVENTS.name)) == 1


def test_what_a_lost_partition_s_record_gives_meanwhile_is_dropped() -> None:
    """Its partition went before the transaction began; its new owner does it."""
    log, stage, bus, loop = started("0/0")
    issue(log, "1/0", partition=1)
    tick_until(loop, lambda: sorted(stage.begun) == ["0/0", "1/0"])
    with MemoryBus(log, "run").consumer("rollout", [PROMPTS.name]) as rival:
        tick_until(loop, lambda: bool(rival.poll(0, 0.0).assigned))
        stage.released = ["0/0"]
        tick_until(loop, lambda: len(bus.held) == 1)
        stage.released = ["1/0"]
        loop.tick()
        bus.held[0].go_on()
        tick_until(loop, lambda: outputs(log) == ["0/0"])
        loop.tick()
    assert (len(bus.held), stage.begun) == (1, {})


def test_new_work_is_taken_between_two_transactions() -> None:
    """Also where a record is ready each time that a transaction ends."""
    log, stage, bus, loop = started("0/0", "0/1", "0/2")
    stage.released = ["0/0"]
    tick_until(loop, lambda: len(bus.held) == 1)
    issue(log, "1/0")
    stage.released = ["0/1"]
    loop.tick()
    bus.held[0].go_on()
    tick_until(loop, lambda: len(bus.held) == 2)
    assert sorted(stage.begun) == ["0/2", "1/0"]


class Parting(HeldStage):
    """Says that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_loop_that_learns_of_its_successor_while_it_closes_releases_everything() -> None:
    """Or its model server would outlive it, and its partitions wait for the session to end."""
    log, _, _, loop = started("0/0", stage=(parting := Parting()))
    parting.begun.clear()
    loop.drain()
    assert loop.done
    MemoryBus(log, "run").producer("rollout.0")
    with pytest.raises(FencedError):
        loop.close()
    assert parting.is_closed
    with MemoryBus(log, "run").consumer("rollout", [PROMPTS.name]) as heir:
        assert len(heir.poll(0, 0.0).assigned) == 2
