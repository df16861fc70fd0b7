"""Every role reads what a newer release wrote, once its schemas are in the topic `schemas`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.schemas.events import ClosedGroups, DeadLetter
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import CONTROL, DEAD_LETTERS, PROMPTS, SCORED, STEPS
from rlstreams.workers.loop.control import ControlFollower
from rlstreams.workers.policy.view import PolicyLedger
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.expired import open_groups
from rlstreams.workers.trainer.intake.payloads import Payloads
from tests import factories
from tests.newer_release import hand_over, newer, publish
from tests.unit.prompts.world import World, started, step, ticks
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_rollout import make_rollout, trajectories
from tests.unit.trainer.test_intake import Site
from tests.unit.trainer.test_intake import scored as scored_sample


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """Weights, prompts and trajectories come from a newer release."""
    made = Stand(tmp_path)
    publish(made.bus())
    made._pen = hand_over(made._pen)
    return made


def test_rollout(stand: Stand) -> None:
    """Newer prompts, newer announcements of weights."""
    stand.publish(0)
    rollout = make_rollout(stand)
    stand.issue("0", 4)
    tick_until(rollout, lambda: len(trajectories(stand)) == 4)
    rollout.close()
    assert [] == stand.read(DEAD_LETTERS.name, DeadLetter)


def test_trainer(strangers: list[str]) -> None:
    """Newer scores and letters; what was released is read again by its position."""
    site = Site()
    publish(site.bus)
    sent = [newer(outgoing(SCORED, scored_sample(n, "7"))) for n in range(2)]
    letter = newer(outgoing(DEAD_LETTERS, factories.dead_letter(group_id="9", sample=0)))
    site.sends(*sent, letter)
    assert [] == site.take()
    assert (2, []) == (site.intake.num_samples, strangers)
    assert ["9/0"] == site.dead()
    positions = [
        raw.position for raw in site.bus.reader(site.bus.beginnings(SCORED.name)).poll(10, 0.0)
    ]
    again = Payloads(site.bus, lambda _: None).take(positions)
    assert [0, 1] == [payload.scored.trajectory.sample for payload in again]


def test_prompts(tmp_path: Path, strangers: list[str]) -> None:
    """An heir goes on behind newer prompts, and folds newer steps."""
    world = World(tmp_path)
    publish(world.bus)
    world.trainer = hand_over(world.trainer)
    world.says(started())
    first = world.worker()
    ticks(first)
    first.close()
    number = len(world.groups())
    theirs = factories.prompt(
        group_id=str(number), sample=0, seed=world.config.run.seed, group_size=1
    )
    world.trainer.commit([outgoing(PROMPTS, theirs, partition=number % 2)])
    world.says(step(1, watermark=1))
    heir = world.worker()
    assert heir._issued.num_groups == number + 1
    ticks(heir)
    assert strangers == []
    heir.close()


def test_readers_without_a_group() -> None:
    """The desired state, the ledger, the hashes of versions, and the groups that are open."""
    site = Site()
    publish(site.bus)
    pen = hand_over(site._pen)
    pen.commit(
        [
            outgoing(CONTROL, factories.control_state(state="paused")),
            outgoing(STEPS, factories.trainer_started(epoch=1, policy_version=0)),
            outgoing(STEPS, factories.step_completed(1, epoch=1, policy_version=1)),
            outgoing(PROMPTS, factories.prompt(group_id="3", sample=0)),
        ]
    )
    assert ControlFollower(site.bus).poll().state == "paused"
    assert PolicyLedger(site.bus).hashes().keys() == {0, 1}
    ledger = read_ledger(site.bus, "test")
    assert ledger.last_step == 1
    assert ["3"] == [g.group_id for g in open_groups(site.bus, ClosedGroups(watermark=0))]
