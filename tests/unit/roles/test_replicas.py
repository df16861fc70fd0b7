"""Two scorers of several ranks, whose ranks die: each ends by name, and the other goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlstreams.schemas.events import DeadLetter, ScoredTrajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, TRAJECTORIES
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.model.base import RankLostError
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import DEADLINE_S, Stand
from tests.unit.roles.test_logprob import segment, trajectory

NUM = 24


class Mortal(FakeScorer):
    """Loses a rank in its second window."""

    def __init__(self, *, lives: bool) -> None:
        super().__init__()
        self.lives, self.num = lives, 0

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        self.num += 1
        if self.num == 2 and not self.lives:
            raise RankLostError("rank 1 of the scorer (process 7) was killed by SIGKILL")
        return super().score(sequences, policy_version, temperature)


def replica(stand: Stand, ordinal: int, *, lives: bool) -> StageLoop:
    context = stand.context("logprob", ordinal)
    return make_worker(context, context.bus, Mortal(lives=lives), FileWeightChannel())


def test_nothing_is_lost_and_no_record_is_blamed(tmp_path: Path) -> None:
    stand = Stand(tmp_path, logprob__workers=2)
    stand.publish(0)
    kills: list[int] = []
    workers = {ordinal: replica(stand, ordinal, lives=False) for ordinal in range(2)}
    sent, deadline = 0, time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline, "not reached in time"
        if sent < NUM:  # one by one, so that there are many windows
            stand.send(outgoing(TRAJECTORIES, trajectory(str(sent), segment(0, 5, 6))))
            sent += 1
        for ordinal, worker in list(workers.items()):
            try:
                worker.tick()
            except RankLostError:
                worker._consumer.expel()
                kills.append(ordinal)  # once each: more at one record and it would be isolated
                workers[ordinal] = replica(stand, ordinal, lives=True)
        events = stand.read(SCORED.name, ScoredTrajectory)
        if sent == NUM and len({e.trajectory.group_id for e in events}) == NUM:
            break
    for worker in workers.values():
        worker.close()
    assert {0, 1} == set(kills)
    assert Counter(str(n) for n in range(NUM)) == Counter(e.trajectory.group_id for e in events)
    assert not stand.read(DEAD_LETTERS.name, DeadLetter)
