"""What the ledger lets `prompts` issue: evaluations, replacements; of room see the machine."""

from __future__ import annotations

import pytest

from rlstreams.schemas.events import NO_VERSION, Event
from rlstreams.streams.ledger import NOWHERE, Ledger
from rlstreams.workers.prompts.plan import evaluation_due
from rlstreams.workers.prompts.replacing import DroppedGroups
from tests.factories import dropped_group, groups_dropped, step_completed, trainer_started


def ledger_of(*events: Event) -> Ledger:
    folded = Ledger()
    for event in events:
        folded.apply(event)
    return folded


@pytest.mark.parametrize("changes", [{"permanent": True}, {"replacement": 3}])
def test_a_hopeless_group_is_replaced_only_if_somebody_asks(changes: dict[str, object]) -> None:
    """Permanent reasons and rows that were replaced often enough are given up; once asked, once."""
    dropped = DroppedGroups(3, 100, pytest.fail)
    event = groups_dropped(groups=(dropped_group("4", **changes),))
    dropped.add(event, NOWHERE)
    assert not dropped.to_replace
    dropped.ask("4")
    dropped.ask("4")
    dropped.add(event, NOWHERE)
    (due,) = dropped.to_replace
    assert ("4", 4, 0) == (due.replaces, due.row, due.dataset_epoch)


def test_evaluations_come_first_regularly_and_last() -> None:
    """Version 0, every fifth, and the last; each once."""
    folded = ledger_of(trainer_started(step_target=12))
    assert evaluation_due(folded, 5, NO_VERSION) == 0
    for number in range(1, 5):
        folded.apply(step_completed(number))
    assert evaluation_due(folded, 5, 0) is None
    for number in range(5, 7):
        folded.apply(step_completed(number))
    assert evaluation_due(folded, 5, 0) == 5
    assert evaluation_due(folded, 0, 0) is None
    for number in range(7, 13):
        folded.apply(step_completed(number))
    assert evaluation_due(folded, 5, 10) == 12
    assert evaluation_due(folded, 0, 0) == 12
    assert evaluation_due(folded, 5, 12) is None
