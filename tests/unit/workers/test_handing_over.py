"""Partitions that move between living workers count as nobody's death, on the in-memory bus."""

from __future__ import annotations

import pytest

from rlstreams.streams.log.done_set import tries_of
from rlstreams.streams.log.errors import FencedError
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS
from rlstreams.workers.loop import stage
from rlstreams.workers.loop.stage import StageLoop
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryGroupConsumer
from tests.memory.log import MemoryLog
from tests.unit.workers.test_stage import HeldStage, issue, make_loop, read

NUM = 8  # partitions, with three samples each


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """In isolation one record after the other is begun without a wait."""
    monkeypatch.setattr(stage, "PATIENCE_S", 0.0)


class Crew:
    """Workers of one group that hold whatever they begin."""

    def __init__(self) -> None:
        self.log: MemoryLog = made_log(partitions=NUM)
        for n in range(NUM):
            issue(self.log, *(f"{n + NUM * k}/0" for k in range(3)), partition=n)
        self.bus = MemoryBus(self.log, "run")
        self.loops: list[StageLoop] = []

    def joins(self) -> StageLoop:
        """One more worker; all tick until each has its share."""
        self.loops.append(make_loop(self.log, HeldStage(), len(self.loops)))
        self.all_tick()
        return self.loops[-1]

    def all_tick(self) -> None:
        for _ in range(10):
            for loop in self.loops:
                loop._next_commit = 0.0
                loop.tick()

    def dies(self, loop: StageLoop) -> None:
        self.loops.remove(loop)
        assert isinstance(loop._consumer, MemoryGroupConsumer)
        loop._consumer.expel()
        self.all_tick()

    def tries(self) -> dict[int, int]:
        """As noted, by partition."""
        found = self.bus.committed("rollout", PROMPTS.name)
        return {p.number: tries_of(at.metadata) for p, at in found.items()}


def test_workers_that_join_one_after_another_cost_no_sample_anything() -> None:
    """Each partition is noted as begun once, by whoever has it now, and all of it is begun."""
    crew = Crew()
    for _ in range(5):
        crew.joins()
    assert [] == read(crew.bus, DEAD_LETTERS.name)
    assert dict.fromkeys(range(NUM), 1) == crew.tries()


def test_a_death_is_not_forgotten_when_its_partition_moves_on() -> None:
    """Or a record that kills slowly would never be found: a restarted worker takes it over."""
    crew = Crew()
    crew.joins()
    crew.dies(crew.joins())
    died = {number for number, tries in crew.tries().items() if tries == 2}
    assert NUM // 2 == len(died)
    crew.joins()
    crew.joins()
    assert dict.fromkeys(range(NUM), 1) | dict.fromkeys(died, 2) == crew.tries()
    assert [] == read(crew.bus, DEAD_LETTERS.name)


def test_a_worker_that_is_fenced_while_it_parts_ends() -> None:
    """Its successor has the id; the poll that tells of the revocation raises it."""
    crew = Crew()
    old = crew.joins()
    MemoryBus(crew.log, "run").producer("rollout.0")
    make_loop(crew.log, HeldStage(), 1).tick()
    with pytest.raises(FencedError):
        old.tick()
