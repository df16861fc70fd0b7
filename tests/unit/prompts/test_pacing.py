"""The fold of `steps` that paces a run."""

from __future__ import annotations

from typing import Any

import pytest

from rlstreams.schemas.events import NO_VERSION, ClosedGroups, Event, GroupsDropped, StepCompleted
from rlstreams.workers.prompts.pacing import Ledger, evaluation_due
from tests.factories import dropped_group, groups_dropped, step_completed, trainer_started


def dropped(group: str, epoch: int = 1, watermark: int = 0, **changes: Any) -> GroupsDropped:
    return groups_dropped(
        epoch=epoch,
        groups=(dropped_group(group, **changes),),
        closed=ClosedGroups(watermark=watermark, above=(int(group),)),
    )


def step(number: int, watermark: int, above: tuple[int, ...] = (), **changes: Any) -> StepCompleted:
    return step_completed(number, closed=ClosedGroups(watermark=watermark, above=above), **changes)


def ledger(*events: Event, max_replacements: int = 3) -> Ledger:
    folded = Ledger(max_replacements)
    for event in events:
        folded.apply(event)
    return folded


def test_nothing_may_be_issued_before_a_claim() -> None:
    """The step target and the versions are the trainer's to say."""
    assert ledger().room(0, max_open=32, groups_per_step=16) == 0
    assert ledger(trainer_started()).room(0, max_open=32, groups_per_step=16) == 32


def test_open_groups_stay_below_the_bound() -> None:
    """Closed groups above the watermark make room as well."""
    folded = ledger(trainer_started(), step(1, 14, (17, 20)))
    assert folded.num_closed == 16
    assert folded.highest_closed == 20
    assert folded.room(32, max_open=32, groups_per_step=16) == 16
    assert [folded.is_closed(number) for number in (3, 15, 17)] == [True, False, True]


def test_no_more_is_issued_than_the_steps_left_can_use() -> None:
    """With one step to go only its groups stay open."""
    folded = ledger(trainer_started(step_target=3), step(1, 16), step(2, 32))
    assert folded.room(32, max_open=32, groups_per_step=16) == 16
    folded.apply(step(3, 48))
    assert folded.target_reached
    assert folded.room(64, max_open=32, groups_per_step=16) == 0


def test_events_of_a_fenced_trainer_are_void() -> None:
    """A lower epoch than the newest claim's changes nothing."""
    folded = ledger(trainer_started(), step(1, 16), trainer_started(epoch=2, policy_version=1))
    folded.apply(step(2, 40, epoch=1))
    folded.apply(dropped("50", epoch=1, watermark=45))
    assert (folded.last_step, folded.watermark, folded.newest_version) == (1, 16, 1)
    assert not folded.to_replace


def test_the_first_completion_of_a_step_wins() -> None:
    """A second event of the same step is passed by."""
    folded = ledger(trainer_started(), step(1, 16), step(1, 20, policy_version=7))
    assert (folded.watermark, folded.newest_version) == (16, 1)


def test_a_dropped_group_is_replaced_once() -> None:
    """The same row, one replacement more, and not twice if the drop is told twice."""
    folded = ledger(trainer_started(), dropped("4", replacement=1), dropped("4", replacement=1))
    (due,) = folded.to_replace
    assert (due.replaces, due.row, due.dataset_epoch, due.replacement) == ("4", 4, 0, 2)


@pytest.mark.parametrize("changes", [{"permanent": True}, {"replacement": 3}])
def test_a_hopeless_group_is_not_replaced(changes: dict[str, object]) -> None:
    """Permanent reasons and rows that were replaced often enough are given up."""
    assert not ledger(trainer_started(), dropped("4", **changes)).to_replace


def test_evaluations_come_first_regularly_and_last() -> None:
    """Version 0, every fifth, and the last; each once."""
    folded = ledger(trainer_started(step_target=12))
    assert evaluation_due(folded, 5, NO_VERSION) == 0
    for number in range(1, 5):
        folded.apply(step(number, 0))
    assert evaluation_due(folded, 5, 0) is None
    for number in range(5, 7):
        folded.apply(step(number, 0))
    assert evaluation_due(folded, 5, 0) == 5
    assert evaluation_due(folded, 0, 0) is None
    for number in range(7, 13):
        folded.apply(step(number, 0))
    assert evaluation_due(folded, 5, 10) == 12
    assert evaluation_due(folded, 0, 0) == 12
    assert evaluation_due(folded, 5, 12) is None
