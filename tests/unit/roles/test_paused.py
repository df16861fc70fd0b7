"""A run that `control` pauses: a role takes nothing new, and goes on when it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlstreams.schemas.events import ScoredTrajectory, Trajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import CONTROL, SCORED, TRAJECTORIES
from rlstreams.workers.loop.control import ControlFollower, ControlledRole
from rlstreams.workers.loop.stage import StageLoop
from tests import factories
from tests.fake_engine import FakeEngine, FakeScorer
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_logprob import make_logprob, segment, send, trajectory
from tests.unit.roles.test_rollout import make_rollout

TICKS = 30  # each reads all that there is


def says(stand: Stand, state: str) -> None:
    stand.send(outgoing(CONTROL, factories.control_state(state=state)))


def begins_nothing_while_paused(
    stand: Stand, role: StageLoop, give_work: Callable[[], None], num_done: Callable[[], int]
) -> None:
    controlled = ControlledRole(role, role, ControlFollower(stand.bus(), every_s=0.0))
    says(stand, "paused")
    controlled.tick()
    give_work()
    for _ in range(TICKS):
        controlled.tick()
        assert role._stage.num_open == 0
    assert (num_done(), role.is_idle) == (0, True)
    says(stand, "running")
    tick_until(controlled, lambda: num_done() > 0)
    controlled.close()


def test_a_paused_rollout_begins_no_prompt(tmp_path: Path) -> None:
    """It has a version, room, and a prompt before it."""
    stand, engine = Stand(tmp_path), FakeEngine()
    rollout = make_rollout(stand, engine)
    stand.publish(0)
    tick_until(rollout, lambda: engine.policy_version == 0)
    begins_nothing_while_paused(
        stand,
        rollout,
        lambda: stand.issue("0", 2),
        lambda: len(stand.read(TRAJECTORIES.name, Trajectory)) + engine.num_sampled,
    )


def test_a_paused_scorer_begins_no_trajectory(tmp_path: Path) -> None:
    """It holds the version that the trajectory wants."""
    stand, scorer = Stand(tmp_path), FakeScorer()
    logprob = make_logprob(stand, scorer)
    stand.publish(0)
    send(stand, trajectory("0", segment(0, 5, 6)))
    tick_until(logprob, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) == 1)
    begins_nothing_while_paused(
        stand,
        logprob,
        lambda: send(stand, trajectory("1", segment(0, 5, 6))),
        lambda: len(stand.read(SCORED.name, ScoredTrajectory)) - 1,
    )
