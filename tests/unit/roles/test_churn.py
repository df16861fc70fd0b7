"""Workers of both roles that come and go all the time: nothing is lost, nothing is done twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstreams.schemas.events import DeadLetter, ScoredTrajectory, Trajectory
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, TRAJECTORIES
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeScorer
from tests.logs import made_log
from tests.unit.roles.stand import DEADLINE_S, Stand
from tests.unit.roles.test_rollout import make_rollout

CHANGES = 20
GROUPS = 60
SIZE = 2
PARTITIONS = 16


class Crew:
    """The workers of one role that are there now."""

    def __init__(self, make: Callable[[int], StageLoop], dice: random.Random) -> None:
        self._make = make
        self._dice = dice
        self._next = 1
        self._deaths = 0
        self.there = {0: make(0)}
        self._leaving: list[StageLoop] = []

    def change(self) -> None:
        """One joins, drains, or dies with what it has in hand."""
        kind = self._dice.choice(("join", "leave", "die")) if len(self.there) > 1 else "join"
        if kind == "join":
            self.there[self._next] = self._make(self._next)
            self._next += 1
            return
        ordinal = self._dice.choice(sorted(self.there))
        worker = self.there.pop(ordinal)
        if kind == "leave" or self._deaths == 2:  # three at one record would be its fault
            worker.drain()
            self._leaving.append(worker)
        else:
            self._deaths += 1
            worker._consumer.expel()  # type: ignore[attr-defined]
            worker.close()

    def tick(self) -> None:
        for worker in (*self.there.values(), *self._leaving):
            worker.tick()
        for worker in [one for one in self._leaving if one.done]:
            self._leaving.remove(worker)
            worker.close()

    def close(self) -> None:
        for worker in (*self.there.values(), *self._leaving):
            worker.close()


@pytest.mark.parametrize("seed", range(3))
def test_no_sample_is_lost_or_made_twice(tmp_path: Path, seed: int) -> None:
    """Twenty joins, leaves and deaths in each role while sixty groups pass through both."""
    dice = random.Random(seed)
    stand = Stand(tmp_path, deadlines__drain_s=DEADLINE_S)
    stand.log = made_log("demo", PARTITIONS)
    stand._pen = stand.bus().producer("stand")
    stand.publish(0)

    def scorer(ordinal: int) -> StageLoop:
        context = stand.context("logprob", ordinal)
        return make_worker(context, context.bus, FakeScorer(), FileWeightChannel())

    crews = [Crew(lambda n: make_rollout(stand, ordinal=n), dice), Crew(scorer, dice)]
    issued, until_s = 0, time.monotonic() + DEADLINE_S
    wanted = Counter((str(group), sample) for group in range(GROUPS) for sample in range(SIZE))
    scored: Counter[tuple[str, int]] = Counter()
    while issued < GROUPS or sum(scored.values()) < sum(wanted.values()):
        assert time.monotonic() < until_s, f"not in time: {wanted - scored} is missing"
        if issued < GROUPS:
            stand.issue(str(issued), SIZE, partition=dice.randrange(PARTITIONS))
            issued += 1
            if issued % (GROUPS // CHANGES) == 0:
                for crew in crews:
                    crew.change()
        for crew in crews:
            crew.tick()
        of_score = (event.trajectory for event in stand.read(SCORED.name, ScoredTrajectory))
        scored = Counter((one.group_id, one.sample) for one in of_score)
    for crew in crews:
        crew.close()
    rolled = stand.read(TRAJECTORIES.name, Trajectory)
    assert wanted == scored
    assert wanted == Counter((one.group_id, one.sample) for one in rolled)
    assert not stand.read(DEAD_LETTERS.name, DeadLetter)
    assert 2 < len({one.worker for one in rolled})
