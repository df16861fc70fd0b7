"""`prompts` of a branch goes on with what its parent would have issued next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import ClosedGroups, RunBranched
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.workers.prompts.handover import handover
from rlstreams.workers.trainer.claim import read_ledger_at
from tests.branch_events import run_branched
from tests.factories import dropped_group, groups_dropped
from tests.unit.prompts.world import PARTITIONS, ROWS, World, started, step, ticks, until

Rows = dict[str, tuple[int, int, str | None]]


def rows_of(world: World) -> Rows:
    """By group its row, epoch, and the group that it replaces."""
    firsts = {name: prompts[0] for name, prompts in world.groups().items()}
    return {name: (p.row, p.dataset_epoch, p.replaces) for name, p in firsts.items()}


def parent_at_2(folder: Path) -> World:
    """Behind step 2: groups 0 to 3 and 6 trained, 5 dropped, and 4 open; it went on to step 3."""
    folder.mkdir()
    world = World(folder, max_replacements=1)
    worker = world.issuing(step_target=40)
    row = rows_of(world)["5"][0]
    lost = dropped_group("5", row=row, replacement=0)
    world.says(step(1, watermark=3))
    ticks(worker)
    closed = ClosedGroups(watermark=3, above=(5,))
    world.says(groups_dropped(groups=(lost,), closed=closed))
    ticks(worker)
    world.says(step(2, watermark=4, closed=ClosedGroups(watermark=4, above=(5, 6))))
    ticks(worker)
    world.says(step(3, watermark=8))
    until(worker, lambda: len(world.groups()) >= 14)
    worker.close()
    return world


def branch_of(world: World, at_step: int, **changes: Any) -> RunBranched:
    dropped: list[Any] = []
    at: Ledger = read_ledger_at(world.bus, at_step, "t", lambda e, _: dropped.extend(e.groups))
    begun = handover(world.bus, at, dropped, world.config, ROWS)
    values = {
        "step": at_step,
        "policy_version": at_step,
        "closed": at.closed,
        "next_group": begun.next_group,
        "next_position": begun.next_position,
        "open": begun.open,
        "dropped": begun.dropped,
    }
    return run_branched(**{**values, **changes})


def test_it_issues_what_was_open_and_then_the_parents_order(tmp_path: Path) -> None:
    """Same numbers, same rows, and the replacement that was due; nothing that the parent closed;
    also after a kill, and in a branch of the branch."""
    parent = parent_at_2(tmp_path / "parent")
    known = rows_of(parent)
    event = branch_of(parent, 2)
    assert ({"4"}, ["5"], 7) == (
        {group.group_id for group in event.open},
        [group.group_id for group in event.dropped],
        event.next_group,
    )
    (tmp_path / "child").mkdir()
    child = World(tmp_path / "child", max_replacements=1)
    child.says(event, started(step_target=40, next_step=3, policy_version=2))
    worker = child.worker()
    until(worker, lambda: len(child.groups()) >= 6)
    worker.close()  # killed: the next one folds the branch's own topic
    own = rows_of(child)
    assert {"4", "7", "8", "9", "10", "11"} == own.keys()
    assert own["4"] == known["4"]
    replacing = {name for name, (_, _, replaces) in own.items() if replaces == "5"}
    assert 1 == len(replacing)
    assert known["5"][:2] == own[replacing.pop()][:2]

    def in_order(rows: Rows) -> list[tuple[int, int]]:
        fresh = [name for name in sorted(rows, key=int) if int(name) > 6 and not rows[name][2]]
        return [rows[name][:2] for name in fresh]

    assert in_order(known)[:4] == in_order(own)[:4]
    child.says(step(3, watermark=8, closed=ClosedGroups(watermark=8)))
    heir = child.worker()
    until(heir, lambda: len(child.groups()) >= 8)
    own = rows_of(child)
    assert in_order(known)[:5] == in_order(own)[:5]
    prompts = [p for group in child.groups().values() for p in group]
    assert {2, 3} == {p.min_policy_version for p in prompts}

    grandchild = branch_of(child, 3)
    assert (8, ()) == (grandchild.next_group, grandchild.open)
    (tmp_path / "third").mkdir()
    third = World(tmp_path / "third", max_replacements=1)
    third.says(grandchild, started(step_target=40, next_step=4, policy_version=3))
    until(third.worker(), lambda: len(third.groups()) >= 6)
    assert in_order(own)[:4] == in_order(rows_of(third))[:4]


def test_a_branch_hands_on_what_it_took_over(tmp_path: Path) -> None:
    """Its parent's open and dropped groups, none of which it has issued."""
    event = branch_of(parent_at_2(tmp_path / "parent"), 2)
    (tmp_path / "child").mkdir()
    child = World(tmp_path / "child", max_replacements=1)
    claim = started(step_target=40, next_step=3, policy_version=2)
    child.says(event, claim, step(3, watermark=4, closed=event.closed))
    again = branch_of(child, 3)
    assert ("4", "5") == (again.open[0].group_id, again.dropped[0].group_id)
    work = ("open", "dropped", "next_group", "next_position")
    assert [getattr(event, name) for name in work] == [getattr(again, name) for name in work]


def test_a_group_whose_prompts_are_gone_cannot_be_handed_over(tmp_path: Path) -> None:
    """It was open at the step, and nobody knows its row."""
    parent = parent_at_2(tmp_path / "parent")
    partition = Partition(PROMPTS.name, 4 % PARTITIONS)
    parent.log.trim(
        Partition(f"run.{PROMPTS.name}", partition.number), parent.bus.ends(PROMPTS.name)[partition]
    )
    with pytest.raises(ConfigError, match="group 4 was open at step 2"):
        branch_of(parent, 2)


def test_it_evaluates_what_it_begins_with(tmp_path: Path) -> None:
    """As a run does with version 0, and from there on those that any run does."""
    world = World(tmp_path, evaluate_every=10)
    world.says(
        run_branched(policy_version=33, step=33),
        started(step_target=60, next_step=34, policy_version=33),
    )
    worker = world.worker()
    ticks(worker)
    assert ["e33-0", "e33-1", "e33-2"] == world.evaluations()
    for number in range(34, 41):
        world.says(step(number, watermark=12))
        ticks(worker)
    assert {"e33", "e40"} == {name.partition("-")[0] for name in world.evaluations()}
