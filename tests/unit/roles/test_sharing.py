"""Rollout and log-prob roles that share a device: they leave it whole, and come back to work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstreams.schemas.events import ScoredTrajectory, Trajectory, WorkerReport
from rlstreams.streams.log.topics import SCORED, TRAJECTORIES, WORKER_EVENTS
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.rollout.clock import SampleClock
from tests.fake_engine import FakeEngine, FakeScorer
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_logprob import make_logprob, segment, send, trajectory
from tests.unit.roles.test_rollout import make_rollout
from tests.waiting import without_waiting

DEADLINE_S = 60.0


class Loads(FakeEngine):
    is_up = False


def change(role: StageLoop, hands: Callable[[], bool]) -> None:
    """Ticks until its memory has left, or is back."""
    until_s = time.monotonic() + DEADLINE_S
    while not hands():
        assert time.monotonic() < until_s
        role.tick()


def test_a_rollout_is_cut_and_goes_on_under_the_version_of_its_next_shift(tmp_path: Path) -> None:
    """Off its device it samples and pulls nothing; the sample keeps its tokens, each labelled."""
    stand = Stand(tmp_path)
    engine = FakeEngine(step_s=0.002)
    rollout = make_rollout(stand, engine, max_new_tokens=90)
    stand.publish(0)
    stand.issue("0", 1)
    tick_until(rollout, lambda: engine.num_sampled > 3)
    rollout.is_paused = True
    change(rollout, rollout.give_up_device)
    sampled = engine.num_sampled
    stand.publish(1)
    tick_until(
        rollout, lambda: stand.read(WORKER_EVENTS.name, WorkerReport)[-1].state == "offloaded"
    )
    assert (engine.num_sampled, engine.policy_version) == (sampled, 0)
    change(rollout, rollout.take_device)
    rollout.is_paused = False
    tick_until(rollout, lambda: bool(stand.read(TRAJECTORIES.name, Trajectory)))
    (found,) = stand.read(TRAJECTORIES.name, Trajectory)
    sampled_by = [s.policy_version for s in found.segments if s.author == "policy"]
    assert sampled_by[0] == 0
    assert sampled_by == sorted(sampled_by)
    rollout.close()


def test_a_shift_is_not_held_before_the_engine_is_up(tmp_path: Path) -> None:
    """A server that still loads takes memory, and no pull: it must not look idle."""
    stand, engine = Stand(tmp_path), Loads()
    rollout = make_rollout(stand, engine)
    stand.publish(0)
    assert not rollout.take_device()
    for _ in range(20):
        rollout.tick()
    assert stand.read(WORKER_EVENTS.name, WorkerReport)[-1].state == "offloaded"
    engine.is_up = True
    assert rollout.take_device()
    tick_until(rollout, lambda: engine.policy_version == 0)
    rollout.close()


def test_a_scorer_finishes_its_window_before_it_leaves(tmp_path: Path) -> None:
    """What is begun is scored; what comes meanwhile waits, and the versions held stay."""
    stand, scorer = Stand(tmp_path), FakeScorer()
    logprob = make_logprob(stand, scorer)
    stand.publish(0)
    send(stand, trajectory("0", segment(0, 5, 6)))
    tick_until(logprob, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) == 1)
    change(logprob, logprob.give_up_device)
    assert scorer.is_away
    send(stand, trajectory("1", segment(0, 5, 6)))
    for _ in range(20):
        logprob.tick()
    assert len(stand.read(SCORED.name, ScoredTrajectory)) == 1
    change(logprob, logprob.take_device)
    assert list(scorer.versions) == [0]
    tick_until(logprob, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) == 2)
    logprob.close()


def test_the_deadline_of_a_sample_stands_still_while_the_engine_sleeps() -> None:
    """Who had time left has as much afterwards, also who came meanwhile; who had none is late."""

    async def scenario() -> None:
        clock = SampleClock()

        async def sample(seconds: float, work_s: float) -> str:
            try:
                async with clock.limit(seconds):
                    await asyncio.sleep(work_s)
            except TimeoutError:
                return "late"
            return "done"

        asleep = asyncio.create_task(sample(0.5, 1.0))
        await asyncio.sleep(0)
        clock.stop()
        came = asyncio.create_task(sample(0.2, 60.0))
        await asyncio.sleep(0.9)
        assert not came.done()
        clock.go_on()
        assert (await asleep, await came) == ("done", "late")
        with pytest.raises(TimeoutError):
            async with clock.limit(0.01):
                await asyncio.sleep(60.0)

    without_waiting(scenario())
