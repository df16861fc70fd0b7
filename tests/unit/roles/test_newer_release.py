"""Every role reads what a newer release wrote, once its schemas are in the topic `schemas`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.avro import fingerprint
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import ClosedGroups, DeadLetter, Event, PolicyPublished
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.streams.views.feed import Feed
from rlstreams.streams.views.folds import Folds
from rlstreams.workers.loop.control import ControlFollower
from rlstreams.workers.loop.foreign import ForeignRecords, events_now
from rlstreams.workers.policy.view import PolicyLedger
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.expired import open_groups
from rlstreams.workers.trainer.intake.payloads import Payloads
from tests import factories
from tests.newer_release import hand_over, newer, publish, schema_record
from tests.unit.prompts.world import World, started, step, ticks
from tests.unit.roles.stand import Stand, make_prompt, tick_until
from tests.unit.roles.test_logprob import make_logprob, scored, segment, trajectory
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


WEATHER = '{"type": "record", "name": "rlstreams.Weather", "fields": []}'


def weather(topic: Topic) -> Outgoing:
    """An event of a kind that only that release has."""
    value = MARKER + fingerprint(WEATHER)
    return Outgoing(topic=topic.name, key=b"run", value=[value], partition=0)


def test_an_unknown_kind_is_passed_by_and_named_where_many_read(strangers: list[str]) -> None:
    """What lies behind it counts."""
    site = Site()
    many = (CONTROL, STEPS, POLICY_VERSIONS)
    site.sends(
        schema_record(WEATHER),
        *map(weather, many),
        outgoing(CONTROL, factories.control_state(state="paused")),
        outgoing(STEPS, factories.trainer_started(epoch=1, policy_version=0)),
        outgoing(STEPS, factories.step_completed(1, epoch=1, policy_version=1)),
        outgoing(POLICY_VERSIONS, factories.policy_published()),
    )
    assert ControlFollower(site.bus).poll().state == "paused"
    assert PolicyLedger(site.bus).hashes().keys() == {0, 1}
    assert read_ledger(site.bus, "test").last_step == 1
    (published,) = events_now(
        site.bus, site.bus.beginnings(POLICY_VERSIONS.name), PolicyPublished, "test"
    )
    assert published == factories.policy_published()
    assert {f"{topic.name}[0]@0" for topic in many} == set(strangers)


def test_an_unknown_kind_is_a_dead_letter_where_records_are_handled(tmp_path: Path) -> None:
    """It names the kind; the prompt behind it is rolled out."""
    stand = Stand(tmp_path)
    stand.send(schema_record(WEATHER), weather(PROMPTS))
    stand.publish(0)
    rollout = make_rollout(stand)
    stand.issue("0", 1)
    tick_until(rollout, lambda: bool(trajectories(stand) and letters(stand)))
    rollout.close()
    (letter,) = letters(stand)
    assert (letter.reason, letter.group_id) == ("decode", "")
    assert "unknown event Weather" in letter.detail


def letters(stand: Stand) -> list[DeadLetter]:
    return stand.read(DEAD_LETTERS.name, DeadLetter)


LEASE = {"device": "gpu", "turn": 1, "holder": "rollout-0", "instance": "i"}


@pytest.mark.parametrize(
    ("unknown", "word"),
    [
        (factories.control_state(state="halted"), "ControlState.state"),
        (factories.device_lease(state="mothballed", **LEASE), "DeviceLease.state"),
    ],
)
def test_an_order_with_an_unknown_word_has_no_effect(
    unknown: Event, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause stays one, a free device free; roles name the record, screens count it."""
    site, said = Site(), []
    monkeypatch.setattr(ForeignRecords, "note", lambda _self, _raw, detail: said.append(detail))
    paused = factories.control_state(state="paused")
    site.sends(outgoing(CONTROL, paused), outgoing(CONTROL, unknown))
    follower = ControlFollower(site.bus).poll()
    assert (follower.state, follower.leases["gpu"].is_free) == ("paused", True)
    assert [detail for detail in said if word in detail and unknown.state in detail] == said  # type: ignore[union-attr]
    assert len(said) == 1
    folds = Folds()
    feed = Feed(site.bus, folds, (CONTROL,))
    feed.poll(0.0)
    assert (1, "paused") == (feed.num_unreadable, folds.control)


def test_a_sample_with_an_unknown_word_is_a_dead_letter(tmp_path: Path) -> None:
    """Of an unknown purpose: it is neither sampled as if for training, nor passed by as if it were
    an evaluation."""
    stand = Stand(tmp_path)
    stand.publish(0)
    logprob = make_logprob(stand)
    theirs = trajectory("0", segment(0, 5, 6), purpose="probe")
    author = replace(segment(0, 5, 6), author="oracle")
    stand.send(
        outgoing(TRAJECTORIES, theirs),
        outgoing(TRAJECTORIES, trajectory("1", author)),
        outgoing(TRAJECTORIES, trajectory("2", segment(0, 5, 6))),
    )
    tick_until(logprob, lambda: "2" in scored(stand))
    logprob.close()
    rollout = make_rollout(stand)
    stand.send(outgoing(PROMPTS, make_prompt("3", 0, 1, purpose="probe"), partition=0))
    tick_until(rollout, lambda: len(letters(stand)) == 3)
    rollout.close()
    details = {letter.group_id: letter.detail for letter in letters(stand)}
    assert details.keys() == {"0", "1", "3"}
    assert all("purpose" in details[n] and "'probe'" in details[n] for n in "03")
    assert "author must be one of" in details["1"]
