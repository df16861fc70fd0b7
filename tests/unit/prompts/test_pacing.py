"""What the ledger lets `prompts` issue: evaluations, replacements; of room see the machine."""

from __future__ import annotations

from rlstreams.schemas.events import NO_VERSION, Event
from rlstreams.streams.ledger import Ledger
from rlstreams.workers.prompts.plan import evaluation_due
from tests.factories import step_completed, trainer_started


def ledger_of(*events: Event) -> Ledger:
    folded = Ledger()
    for event in events:
        folded.apply(event)
    return folded


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
