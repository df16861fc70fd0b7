"""Rollout and log-prob set aside what they cannot handle, with its place, and go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlstreams.schemas.events import DeadLetter, Trajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.done_set import covered
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, TRAJECTORIES
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeEngine
from tests.unit.roles.stand import Stand, make_prompt, make_sampler, tick_until


def make_rollout(stand: Stand, *, step_s: float = 0.0, deadline_s: float = 120.0) -> StageLoop:
    context = stand.context("rollout")
    engine = FakeEngine(step_s=step_s, slots=8)
    sampler = dataclasses.replace(make_sampler(stand, engine), deadline_s=deadline_s)
    return make_worker(context, context.bus, engine, FileWeightChannel(), sampler)


def letters(stand: Stand) -> list[DeadLetter]:
    return stand.read(DEAD_LETTERS.name, DeadLetter)


def test_a_rollout_past_its_deadline_is_set_aside(tmp_path: Path) -> None:
    """Sample, reason, place and bytes; its offset is committed with the letter."""
    stand = Stand(tmp_path)
    stand.publish(0)
    rollout = make_rollout(stand, step_s=1.0, deadline_s=0.02)
    stand.issue("0", 1)
    tick_until(rollout, lambda: bool(letters(stand)))
    rollout.close()
    (letter,) = letters(stand)
    assert ("0", 0, "deadline", False) == (
        letter.group_id,
        letter.sample,
        letter.reason,
        letter.permanent,
    )
    assert "sample 0/0 was not finished by engine" in letter.detail
    assert (PROMPTS.name, 0, 0) == (
        letter.origin_topic,
        letter.origin_partition,
        letter.origin_offset,
    )
    committed = stand.bus().committed("rollout", PROMPTS.name)
    assert covered(committed[Partition(PROMPTS.name, 0)], 0)


def test_a_prompt_that_no_run_issues_does_not_end_the_worker(tmp_path: Path) -> None:
    """It is set aside for good, also where its JSON exhausts Python's stack; the prompt behind it
    is rolled out."""
    stand = Stand(tmp_path)
    stand.publish(0)
    rollout = make_rollout(stand)
    bad = make_prompt("0", 0, 1, metadata="[" * 100_000)
    stand.send(outgoing(PROMPTS, bad, partition=0))
    stand.issue("1", 1)
    tick_until(
        rollout, lambda: len(letters(stand)) == len(stand.read(TRAJECTORIES.name, Trajectory)) == 1
    )
    rollout.close()
    (letter,) = letters(stand)
    assert ("validation", True) == (letter.reason, letter.permanent)
    assert "recursion" in letter.detail


def test_a_stranger_among_the_announcements_does_not_end_the_worker(tmp_path: Path) -> None:
    """Nor does one in `control`: they are passed by."""
    stand = Stand(tmp_path)
    stand.send(Outgoing(topic="policy-versions", key=b"m", value=[b"rubbish"]))
    stand.send(Outgoing(topic="control", key=b"run", value=[b"rubbish"]))
    stand.publish(0)
    rollout = make_rollout(stand)
    stand.issue("1", 1)
    tick_until(rollout, lambda: bool(stand.read(TRAJECTORIES.name, Trajectory)))
    rollout.close()
    assert [] == letters(stand)
