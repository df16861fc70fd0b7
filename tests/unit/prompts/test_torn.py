"""A transaction of `prompts` that was cut: what an heir writes again, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.events import EVALUATE, ClosedGroups, Prompt
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.workers.dataset.order import Order
from tests.factories import dropped_group, groups_dropped
from tests.unit.prompts.world import ROWS, World, started, step, ticks


def torn(folder: Path, is_kept: Callable[[Prompt], bool], **prompts: int) -> World:
    """A run whose first transactions are in its topic as far as `is_kept` says."""
    whole = World(folder, **prompts)
    worker = whole.issuing(step_target=40)
    worker.close()
    world = World(folder, **prompts)
    kept = [outgoing(PROMPTS, p, partition=at) for at, p in whole.issued() if is_kept(p)]
    world.bus.producer("prompts.0").commit(kept)
    world.says(started(step_target=40))
    return world


def go_on(world: World, steps: range) -> None:
    """One heir that issues until these steps are made."""
    heir = world.worker()
    for number in steps:
        ticks(heir)
        world.says(step(number, watermark=3 * number))
    ticks(heir)


@pytest.mark.parametrize("lost", [{"1"}, {"0"}, {"5"}, {"2", "5"}, {"0", "1", "4"}])
def test_the_number_of_a_group_that_is_gone_goes_to_the_next(
    tmp_path: Path, lost: set[str]
) -> None:
    """No number is left out or given twice, and no group is issued twice.

    A cut transaction has lost what went to one partition, or to several.
    """
    world = torn(tmp_path, lambda prompt: prompt.group_id not in lost)
    for steps in (range(1, 3), range(3, 6), range(6, 9)):
        go_on(world, steps)
    groups = world.groups()
    assert [str(number) for number in range(len(groups))] == sorted(groups, key=int)
    assert {2} == {len(samples) for samples in groups.values()}
    places = [(samples[0].dataset_epoch, samples[0].row) for samples in groups.values()]
    assert len(set(places)) == len(places)


def test_a_torn_group_is_mended_while_it_is_open(tmp_path: Path) -> None:
    """Its other samples are written once, beside the first; of a closed group nobody wants them."""
    lost = {("1", 1), ("4", 1), ("5", 0)}
    world = torn(tmp_path, lambda prompt: (prompt.group_id, prompt.sample) not in lost)
    world.says(step(1, watermark=3))
    for _ in range(2):
        go_on(world, range(0))
    groups = {name: sorted(p.sample for p in own) for name, own in world.groups().items()}
    assert [0] == groups.pop("1")
    assert {(0, 1)} == {tuple(samples) for samples in groups.values()}
    for name in ("4", "5"):
        own = [(at, p) for at, p in world.issued() if p.group_id == name]
        assert 1 == len({(at, p.row, p.dataset_epoch, p.min_policy_version) for at, p in own})


def test_what_retention_removed_is_not_issued_again(tmp_path: Path) -> None:
    """Its groups are closed; only the number of the open one that is gone is given again."""
    world = torn(tmp_path, lambda prompt: prompt.group_id != "4")
    world.says(groups_dropped(groups=(), closed=ClosedGroups(watermark=2, above=(3,))))
    for number in range(2):
        world.log.trim(Partition(f"run.{PROMPTS.name}", number), 2)
    before = set(world.groups())
    go_on(world, range(0))
    order = Order(world.config.run.seed, ROWS)
    new = {n: samples[0].row for n, samples in world.groups().items() if n not in before}
    expected = {"4": 6, "6": 7, "7": 8, "8": 9}
    assert {n: order.at(position)[1] for n, position in expected.items()} == new


def test_a_replacement_that_is_gone_comes_again(tmp_path: Path) -> None:
    """Its number goes to whatever is due."""
    whole = World(tmp_path)
    whole.says(started(step_target=40))
    drop = dropped_group("1", row=Order(0, ROWS).at(1)[1])
    dropped = groups_dropped(groups=(drop,), closed=ClosedGroups(watermark=0, above=(1,)))
    worker = whole.worker()
    ticks(worker)
    whole.says(dropped, step(1, watermark=3))
    ticks(worker)
    worker.close()
    (replacing,) = [n for n, samples in whole.groups().items() if samples[0].replaces]
    for lost in ({replacing}, {replacing, "7"}, {replacing, "8"}):
        world = World(tmp_path)
        kept = [(at, p) for at, p in whole.issued() if p.group_id not in lost]
        records = [outgoing(PROMPTS, p, partition=at) for at, p in kept]
        world.bus.producer("prompts.0").commit(records)
        world.says(started(step_target=40), dropped, step(1, watermark=3))
        go_on(world, range(2, 4))
        groups = world.groups()
        assert ["1"] == [s[0].replaces for s in groups.values() if s[0].replaces]
        assert [str(number) for number in range(len(groups))] == sorted(groups, key=int)


LOST = [{"e0-1/1"}, {"e0-1/0"}, {"e0-0/0", "e0-0/1", "e0-2/2"}]


@pytest.mark.parametrize("lost", LOST)
def test_a_torn_evaluation_is_mended(tmp_path: Path, lost: set[str]) -> None:
    """Whichever of a row's samples are gone are written again, once, as they were."""
    names = [f"e0-{row}/{sample}" for row in range(3) for sample in range(3)]

    def evaluated(world: World) -> dict[str, tuple[int, Prompt]]:
        found = [(at, p) for at, p in world.issued() if p.purpose == EVALUATE]
        assert len(names) == len(found)
        return {f"{p.group_id}/{p.sample}": (at, p) for at, p in found}

    world = torn(tmp_path, lambda p: f"{p.group_id}/{p.sample}" not in lost, evaluate_samples=3)
    for _ in range(2):
        go_on(world, range(0))
        assert names == sorted(evaluated(world))
    events = evaluated(world)
    assert {(3, 0)} == {(p.group_size, p.min_policy_version) for _, p in events.values()}
    assert all(at == p.row and f"held_out {p.row}" == p.text for at, p in events.values())


def test_a_torn_evaluation_that_was_passed_by_is_left_as_it_is(tmp_path: Path) -> None:
    """What is sampled now has newer weights; the next one is issued whole."""
    world = torn(tmp_path, lambda p: p.group_id != "e0-1" or p.sample == 0, evaluate_samples=2)
    world.config = replace(world.config, prompts=replace(world.config.prompts, evaluate_every=1))
    world.says(step(1, watermark=0))
    go_on(world, range(0))
    ids = ["e0-0", "e0-0", "e0-1", "e0-2", "e0-2"]
    assert [*ids, *(f"e1-{row}" for row in (0, 0, 1, 1, 2, 2))] == world.evaluations()


def test_a_torn_evaluation_keeps_the_size_that_it_was_issued_with(tmp_path: Path) -> None:
    """A resumed run may ask for more answers; those of one evaluation belong together."""
    world = torn(tmp_path, lambda p: p.group_id != "e0-1" or p.sample == 0, evaluate_samples=2)
    world.config = replace(world.config, prompts=replace(world.config.prompts, evaluate_samples=4))
    go_on(world, range(0))
    samples = [p for _, p in world.issued() if p.purpose == EVALUATE]
    assert {2} == {p.group_size for p in samples}
    assert ["e0-0", "e0-0", "e0-1", "e0-1", "e0-2", "e0-2"] == world.evaluations()
