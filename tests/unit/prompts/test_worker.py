"""The role `prompts` on the memory bus: pacing, evaluation, and a restart after anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.schemas.events import TRAIN
from rlstreams.streams.log.errors import ConfigError, FencedError
from rlstreams.streams.log.topics import CONTROL
from rlstreams.workers.loop.control import ControlFollower, ControlledRole
from tests.factories import control_state
from tests.unit.prompts.world import PARTITIONS, World, started, step, ticks, until


def test_nothing_is_issued_before_the_claim(tmp_path: Path) -> None:
    """The first tick after the claim issues version 0's evaluation and the first groups."""
    world = World(tmp_path)
    with_claim = world.worker()
    ticks(with_claim)
    assert not world.issued()
    world.says(started())
    ticks(with_claim)
    assert world.evaluations() == ["e0-0", "e0-1", "e0-2"]
    assert [str(number) for number in range(6)] == sorted(world.groups())


def test_samples_of_a_group_share_partition_and_row(tmp_path: Path) -> None:
    """Samples are 0..size-1 of one row, in the group's partition, with the newest version."""
    world = World(tmp_path)
    world.issuing(policy_version=2)
    rows = []
    for group_id, samples in world.groups().items():
        assert [sample.sample for sample in samples] == [0, 1]
        assert {(2, 2)} == {(s.group_size, s.min_policy_version) for s in samples}
        rows.append(samples[0].row)
        places = {at for at, prompt in world.issued() if prompt.group_id == group_id}
        assert places == {int(group_id) % PARTITIONS}
    assert len(set(rows)) == len(rows)
    text = samples[0].text
    assert (f"train {samples[0].row}", str(samples[0].row)) == (text, samples[0].answer)
    assert [ord(c) for c in text] == samples[0].token_ids.numpy().tolist()


def test_the_end_needs_no_spare_groups_and_one_evaluation(tmp_path: Path) -> None:
    """At the target nothing more is issued but the last version's evaluation; then it is done."""
    world = World(tmp_path)
    world.says(started())
    worker = world.worker()
    for number in range(1, 5):
        ticks(worker)
        assert not worker.done
        world.says(step(number, watermark=3 * number))
    ticks(worker)
    assert worker.done
    assert len(world.groups()) == 12
    assert world.evaluations()[3:] == ["e4-0", "e4-1", "e4-2"]


def test_closed_groups_that_were_never_issued_are_refused(tmp_path: Path) -> None:
    """An empty topic beside closed groups would be filled with numbers that are taken."""
    world = World(tmp_path)
    world.says(started(), step(1, watermark=3))
    worker = world.worker()
    with pytest.raises(ConfigError, match="closed group 2, but topic prompts ends with group -1"):
        ticks(worker)


def test_a_predecessor_is_fenced(tmp_path: Path) -> None:
    """What wakes up after a restart issues nothing."""
    world = World(tmp_path)
    first = world.worker()
    heir = world.worker()
    world.says(started())
    ticks(heir)
    with pytest.raises(FencedError):
        ticks(first)
    assert len(world.groups()) == 6
    first.close()


def test_a_paused_run_issues_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.says(control_state(state="paused"), topic=CONTROL)
    world.says(started())
    worker = world.worker()
    role = ControlledRole(worker, worker, ControlFollower(world.bus))
    ticks(role)
    assert not world.issued()
    world.says(control_state(state="running"), topic=CONTROL)
    until(role, lambda: len(world.groups()) == 6)
    world.says(control_state(state="draining"), topic=CONTROL)
    until(role, lambda: role.done)


def test_a_finished_run_that_is_to_go_on_is_not_done(tmp_path: Path) -> None:
    """The target of the old claim does not end a worker that was told of more steps."""
    world = World(tmp_path)
    first = world.issuing(step_target=1)
    world.says(step(1, watermark=3))
    ticks(first)
    assert not first.done
    world.says(started(epoch=2, step_target=4, policy_version=1))
    ticks(first)
    assert len(world.groups()) == 9


def test_each_held_out_row_may_have_several_answers(tmp_path: Path, strangers: list[str]) -> None:
    """`evaluate_samples` of each, numbered, and a restart knows them all and issues none twice."""
    world = World(tmp_path, evaluate_samples=2, evaluate_rows=2)
    world.says(started())
    for _ in range(2):
        worker = world.worker()
        ticks(worker)
        assert [] == strangers
        worker.close()
    issued = [(p.group_id, p.sample, p.group_size) for _, p in world.issued() if p.purpose != TRAIN]
    assert [(f"e0-{row}", sample, 2) for row in range(2) for sample in range(2)] == sorted(issued)
