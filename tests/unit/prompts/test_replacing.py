"""What operators ask for comes once: whatever the limits say, and whoever restarts in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlstreams.schemas.events import ClosedGroups, Event
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS
from tests.factories import dead_letter, dropped_group, groups_dropped, replacement_requested
from tests.unit.prompts.world import World, started, step, ticks


def drop(group_id: str, **changes: Any) -> Event:
    dropped = dropped_group(group_id, reason="dead_samples", **changes)
    return groups_dropped(
        groups=(dropped,), closed=ClosedGroups(watermark=0, above=(int(group_id),))
    )


def ask(world: World, group_id: str, run: str = "run") -> None:
    world.says(replacement_requested(run=run, group_id=group_id), topic=DEAD_LETTERS)


def answers(world: World) -> list[tuple[str, str, int, int]]:
    """Group, replaced group, row and replacement number of every replacing group."""
    first = [samples[0] for samples in world.groups().values()]
    found = [(p.group_id, p.replaces, p.row, p.replacement) for p in first if p.replaces]
    return sorted(found, key=lambda answer: int(answer[0]))


def test_a_request_is_answered_once_over_any_number_of_restarts(tmp_path: Path) -> None:
    """Two requests for one group, three workers: one group; it can itself be asked for later."""
    world = World(tmp_path)
    world.says(started())
    for _ in range(3):
        worker = world.worker()
        ticks(worker)
        if not answers(world):
            world.says(drop("1", row=5, permanent=True))
            ask(world, "1")
            ask(world, "1")
        ticks(worker)
        worker.close()
    ((number, *_),) = answers(world)
    world.says(drop(number, row=5, permanent=True, replacement=1))
    ask(world, number)
    heir = world.worker()
    ticks(heir)
    assert [("1", 1), (number, 2)] == [(of, count) for _, of, _, count in answers(world)]


def test_a_request_for_an_open_group_waits_for_its_end(tmp_path: Path) -> None:
    """Dropped later, it is answered; trained, it never is."""
    world = World(tmp_path)
    worker = world.issuing()
    ask(world, "0")
    ask(world, "4")
    ticks(worker)
    assert [] == answers(world)
    world.says(step(1, watermark=3), drop("4", row=2, permanent=True))
    ticks(worker)
    assert ["4"] == [of for _, of, _, _ in answers(world)]


def test_requests_of_another_run_and_foreign_records_change_nothing(
    tmp_path: Path, strangers: list[str]
) -> None:
    """They are passed by; letters too."""
    world = World(tmp_path)
    worker = world.issuing()
    world.says(drop("1", permanent=True))
    ask(world, "1", run="other")
    foreign = Outgoing(topic=DEAD_LETTERS.name, key=b"1", value=[b"rubbish"])
    world.trainer.commit([foreign, outgoing(DEAD_LETTERS, dead_letter(group_id="1"))])
    ticks(worker)
    assert [] == answers(world)
    (named,) = strangers
    assert named.startswith("dead-letters[0]@")


def test_a_drop_that_names_no_row_of_the_data_is_not_replaced(tmp_path: Path) -> None:
    """A stranger's record was its group's first: the others go on."""
    world = World(tmp_path)
    worker = world.issuing()
    world.says(drop("5", row=10**9))
    ticks(worker)
    assert [] == answers(world)
    assert 7 == worker._issued.num_groups


def test_a_request_before_the_drop_lifts_the_maximum_too(tmp_path: Path) -> None:
    """Whichever comes first, and for an heir as well."""
    world = World(tmp_path, max_replacements=0)
    first = world.issuing()
    ask(world, "1")
    world.says(drop("1", row=1), drop("2", row=2))
    first.close()
    for _ in range(2):
        heir = world.worker()
        ticks(heir)
        heir.close()
        assert ["1"] == [of for _, of, _, _ in answers(world)]
