"""Versions of the log-prob role: pulled beside the scoring, and never taken from a window."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import PolicyPublished, ScoredTrajectory
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.logprob.held import HeldVersions
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.weights.channel import Pulled, WeightChannel
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_logprob import segment, send, trajectory


class Halting(FakeScorer):
    """Stands still in the pull, or in the score, of certain versions."""

    def __init__(self, *, pull: int = -1, score: int = -1) -> None:
        super().__init__()
        self._pull, self._score = pull, score
        self.goes_on = threading.Event()

    def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        assert published.policy_version != self._pull or self.goes_on.wait(30)
        return super().pull(published, channel)

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        assert policy_version != self._score or self.goes_on.wait(30)
        return super().score(sequences, policy_version, temperature)


def scored(stand: Stand) -> set[str]:
    return {s.trajectory.group_id for s in stand.read(SCORED.name, ScoredTrajectory)}


def test_a_pull_holds_up_no_window_of_other_versions(tmp_path: Path) -> None:
    """Scored while the version of an older trajectory is being pulled."""
    stand, scorer = Stand(tmp_path), Halting(pull=1)
    stand.publish(0)
    context = stand.context("logprob")
    logprob = make_worker(context, context.bus, scorer, FileWeightChannel())
    tick_until(logprob, lambda: bool(scorer.versions))
    stand.publish(1)
    send(stand, trajectory("1", segment(1, 5)), trajectory("0", segment(0, 5)))
    tick_until(logprob, lambda: scored(stand) == {"0"})
    scorer.goes_on.set()
    tick_until(logprob, lambda: scored(stand) == {"0", "1"})
    logprob.close()


def test_versions_come_while_a_window_is_scored_and_its_own_stays(tmp_path: Path) -> None:
    """Two newer ones push it out of what new windows use; it goes when its window is done."""
    stand = Stand(tmp_path, logprob__versions_held=2)
    scorer = Halting(score=0)
    context = stand.context("logprob")
    stand.publish(0)
    logprob = make_worker(context, context.bus, scorer, FileWeightChannel())
    send(stand, trajectory("0", segment(0, 5)))
    stage: Any = logprob._stage
    tick_until(logprob, lambda: len(stage._windows) == 1)
    for version in (1, 2):
        stand.publish(version)
        tick_until(logprob, lambda version=version: version in scorer.versions)  # type: ignore[misc]
    stand.publish(3)
    for _ in range(10):
        logprob.tick()
    assert [0, 1, 2] == scorer.versions
    scorer.goes_on.set()
    tick_until(logprob, lambda: scored(stand) == {"0"} and list(scorer.versions) == [2, 3])
    logprob.close()


@dataclass
class FakePuller:
    """A version that was asked for comes with the next poll; all are available."""

    asked: int | None = None
    last: int = 0
    view: Any = field(default_factory=lambda: SimpleNamespace(get=lambda version: version))

    def available(self) -> set[int]:
        return set(range(self.last + 1))

    def newest(self) -> Any:
        return SimpleNamespace(policy_version=self.last) if self.asked is None else None

    @property
    def pulling(self) -> int | None:
        return self.asked

    def start(self, version: int) -> None:
        assert self.asked is None
        self.asked = version

    def poll(self) -> int | None:
        came, self.asked = self.asked, None
        return came


class Names:
    """Holds names only."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def drop(self, version: int) -> None:
        self.versions.remove(version)


TRAJECTORIES = st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=3), max_size=12)


@settings(max_examples=200, deadline=None)
@given(limit=st.integers(1, 3), waiting=TRAJECTORIES, random=st.randoms())
def test_every_trajectory_gets_its_versions(
    limit: int, waiting: list[set[int]], random: Any
) -> None:
    """Whatever is asked for in whatever order; never more than one version beyond the limit."""
    scorer, puller = Names(), FakePuller(last=9)
    held = HeldVersions(scorer, puller, limit)  # type: ignore[arg-type]
    left = [frozenset(one) for one in waiting]
    under_way: list[frozenset[int]] = []
    for _ in range(20 * (len(waiting) + 1)):
        if puller.asked is not None and puller.asked not in scorer.versions:
            scorer.versions.append(puller.asked)
        wanted = held.wanted(left)
        first = wanted[left[0]] if left else frozenset[int]()
        held.follow(first, frozenset[int]().union(*wanted.values()), under_way)
        assert len(scorer.versions) <= limit + 1
        assert all(used <= set(scorer.versions) for used in under_way)
        if under_way and random.random() < 0.5:
            under_way.pop()
        ready = [one for one in left if wanted[one] <= held.now]
        if ready and not under_way:
            under_way.append(frozenset().union(*(wanted[one] for one in ready)))
            left = [one for one in left if one not in ready]
    assert not left
    if not under_way:
        assert 9 in held.now
