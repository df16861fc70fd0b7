"""What operators are told of dead letters and their groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rlstreams.debug.letters.view import LettersView
from rlstreams.schemas.events import ClosedGroups, Event
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    prompt,
    replacement_requested,
    step_completed,
    trainer_started,
)


def drop(group_id: str, above: tuple[int, ...], **changes: Any) -> Event:
    return groups_dropped(
        groups=(dropped_group(group_id, reason="dead_samples", **changes),),
        closed=ClosedGroups(watermark=0, above=above),
    )


def folded(*events: Event) -> LettersView:
    view = LettersView()
    for event in events:
        view.apply(event)
    return view


HISTORY: tuple[tuple[Event, ...], ...] = (
    (
        trainer_started(step_target=1),
        drop("1", (1,)),
        drop("2", (1, 2)),
        drop("3", (1, 2, 3)),
        step_completed(1, closed=ClosedGroups(watermark=4)),
    ),
    (*(prompt(group_id=str(n)) for n in range(6)), prompt(group_id="6", replaces="2")),
    (dead_letter(group_id="1"), replacement_requested(group_id="3")),
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_fate_of_a_group_does_not_depend_on_which_topic_is_read_first(
    order: tuple[int, ...],
) -> None:
    """Open, trained, dropped, asked for, replaced: whatever the order between topics."""
    view = folded(*(event for topic in order for event in HISTORY[topic]))
    fates = {group: str(view.group(group)) for group in ("", "e0-1", "0", "1", "2", "3", "4", "9")}
    assert {
        "": "no group",
        "e0-1": "evaluation",
        "0": "trained",
        "1": "dropped: dead_samples",
        "2": "replaced by 6",
        "3": "asked for",
        "4": "open",
        "9": "never issued",
    } == fates
    assert view.ledger.at_target


def test_letters_keep_their_place_and_size_but_not_their_bytes() -> None:
    """A run may have gigabytes of them; the bytes of those that were asked for are kept."""
    letters = [dead_letter(sample=n, value=bytes(100), origin_offset=n) for n in range(2)]
    view = LettersView(keep_bytes=lambda letter: letter.sample == 1)
    for letter in letters:
        view.apply(letter)
    assert [0, 100] == [len(letter.event.value) for letter in view.letters]
    assert [100, 100] == [letter.num_bytes for letter in view.letters]
    assert ["prompts-1@0", "prompts-1@1"] == [letter.origin for letter in view.letters]
    assert ["7/0", "7/1"] == [letter.sample for letter in view.letters]
