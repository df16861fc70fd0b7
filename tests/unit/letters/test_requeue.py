"""Which groups may be asked for, and the request that comes of it."""

from __future__ import annotations

import pytest

from rlstreams.debug.letters.view import read_letters, request, select, select_by_reason
from rlstreams.schemas.events import ClosedGroups, ReplacementRequested
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, STEPS
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    prompt,
    replacement_requested,
    trainer_started,
)
from tests.logs import made_log
from tests.memory.bus import MemoryBus

MAX_REPLACEMENTS = 3
DEADLINE_S = 60.0


@pytest.fixture
def bus() -> MemoryBus:
    """Groups 0 to 8: trained, open, replaced, asked for, permanent, exhausted, pending, its
    replacement, dropped without a row."""
    log = made_log()
    bus = MemoryBus(log, "run")
    drops = (
        dropped_group("2"),
        dropped_group("3", permanent=True),
        dropped_group("4", permanent=True),
        dropped_group("5", replacement=MAX_REPLACEMENTS),
        dropped_group("6"),
        dropped_group("8", row=-1),
    )
    closed = ClosedGroups(watermark=1, above=(2, 3, 4, 5, 6, 8))
    reasons = {"1": "engine", "2": "reward", "4": "reward", "5": "decode", "6": "reward"}
    letters = [dead_letter(group_id=group, reason=reason) for group, reason in reasons.items()]
    with bus.producer("test") as pen:
        pen.commit([outgoing(PROMPTS, prompt(group_id=str(n))) for n in range(7)])
        pen.commit([outgoing(PROMPTS, prompt(group_id="7", replaces="2"))])
        pen.commit([outgoing(PROMPTS, prompt(group_id="8"))])
        pen.commit([outgoing(STEPS, trainer_started())])
        pen.commit([outgoing(STEPS, groups_dropped(groups=drops, closed=closed))])
        pen.commit([outgoing(DEAD_LETTERS, letter) for letter in letters])
        pen.commit([outgoing(DEAD_LETTERS, replacement_requested(group_id="3"))])
    return bus


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ("0", "group 0 was trained"),
        ("1", "group 1 is open"),
        ("2", "group 2 was replaced by group 7"),
        ("3", "group 3 was asked for before"),
        ("4", ""),
        ("5", ""),
        ("6", "group 6 will be replaced by prompts without being asked for"),
        ("8", ""),  # perhaps it was replaced too often: only `prompts` knows
        ("99", "group 99 was never issued"),
        ("e0-1", "'e0-1' is no training group"),
    ],
)
def test_each_refusal_is_a_sentence(bus: MemoryBus, group: str, told: str) -> None:
    """A group that nobody would answer for is not asked for."""
    chosen, refused = select(read_letters(bus, DEADLINE_S), [group], MAX_REPLACEMENTS)
    assert ([] if told else [group]) == chosen
    assert told in "; ".join(refused)
    assert bool(told) == bool(refused)


def test_a_reason_chooses_all_that_can_be_asked_for(bus: MemoryBus) -> None:
    """The others are passed by without a word."""
    view = read_letters(bus, DEADLINE_S)
    assert ["4"] == select_by_reason(view, "reward", MAX_REPLACEMENTS)
    assert [] == select_by_reason(view, "scoring", MAX_REPLACEMENTS)


def test_a_request_is_a_fact_in_the_log(bus: MemoryBus) -> None:
    """One record a group, under the run's id; asked once, it cannot be asked for again."""
    request(bus, "run", ["4", "5"], "verifier mended")
    with bus.reader(bus.beginnings(DEAD_LETTERS.name)) as reader:
        events = [decoded(raw).event for raw in reader.poll(100, 0.0)]
    asked = [event for event in events if isinstance(event, ReplacementRequested)][1:]
    assert [("run", "4"), ("run", "5")] == [(event.run, event.group_id) for event in asked]
    assert {"verifier mended"} == {event.reason for event in asked}
    _, refused = select(read_letters(bus, DEADLINE_S), ["4"], MAX_REPLACEMENTS)
    assert ["group 4 was asked for before: prompts will answer"] == refused


def test_an_operator_without_a_name_can_ask(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container a user id need not have one."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 3_999_999_999)
    request(bus, "run", ["4"], "mended")
    with bus.reader(bus.beginnings(DEAD_LETTERS.name)) as reader:
        events = [decoded(raw).event for raw in reader.poll(100, 0.0)]
    asked = [event for event in events if isinstance(event, ReplacementRequested)][-1]
    assert "uid 3999999999" == asked.by
