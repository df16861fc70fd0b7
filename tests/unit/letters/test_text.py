"""Dead letters as operators read them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest

from rlstreams.debug.letters.text import json_line, table, whole
from rlstreams.debug.letters.view import LettersView
from rlstreams.schemas import encode
from rlstreams.schemas.events import DeadLetter, Event
from tests.factories import NOW_MS, dead_letter, dropped_group, groups_dropped, trajectory


def bytes_of(event: Event) -> bytes:
    return b"".join(bytes(piece) for piece in encode(event))


def view_of(*events: Event) -> LettersView:
    view = LettersView(keep_bytes=lambda _: True)
    for event in events:
        view.apply(event)
    return view


def letters() -> list[DeadLetter]:
    return [
        dead_letter(group_id="8", detail="judge.py:3:\n KeyError", value=bytes_of(trajectory())),
        dead_letter(group_id="", sample=-1, reason="decode", permanent=True, value=b"\x00rubbish"),
    ]


def test_the_table_has_a_line_for_each_letter_and_totals() -> None:
    """Times in UTC; a detail of two lines is one; only a width cuts it."""
    view = view_of(*letters(), groups_dropped())
    head, first, second, total = table(view, view.letters).splitlines()
    assert ["when", "(UTC)", "worker", "reason", "permanent"] == head.split()[:5]
    when = f"{datetime.fromtimestamp(NOW_MS / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    cells = [when, "rollout-0", "reward", "no", "8/2", "dropped: stale", "prompts-1@17"]
    assert [*cells, "judge.py:3: KeyError"] == re.split(r"  +", first)
    assert ["decode", "yes", "-", "no group"] == re.split(r"  +", second)[2:6]
    assert "2 dead letters: reward 1, decode 1" == total
    assert 60 == max(len(line) for line in table(view, view.letters, 60).splitlines())
    assert "no dead letters" == table(view_of(), []).splitlines()[-1]


def test_letters_of_one_cause_are_one_line() -> None:
    """By the place and the name of the error; by what does not vary where no code is named."""
    raised = "/p/judge.py:{}: judge raised {}: '{}'"
    details = [raised.format(7, "KeyError", word) for word in "abc"]
    details += [raised.format(9, "KeyError", "a"), raised.format(7, "TypeError", "a")]
    details += [f"no answer of row {n} in {n}.5 s" for n in range(2)]
    view = view_of(*(dead_letter(group_id=f"{n}", detail=d) for n, d in enumerate(details)))
    told = table(view, view.letters).splitlines()[len(details) + 1 :]
    assert told == [
        "7 dead letters: reward 7",
        "by cause, each with its newest detail:",
        f"      3  reward: {details[2]}",
        f"      2  reward: {details[6]}",
        f"      1  reward: {details[3]}",
        f"      1  reward: {details[4]}",
    ]


@pytest.mark.parametrize("at_ms", [1 << 62, -(1 << 62), (1 << 63) - 1])
def test_a_letter_whose_bytes_and_clock_make_no_sense_is_shown_whole(at_ms: int) -> None:
    """Whose it is, why, where its record lay, and its bytes."""
    value = bytes_of(trajectory())[:10] + b"\xff" * 300
    letter = dead_letter(
        group_id="",
        sample=-1,
        reason="decode",
        permanent=True,
        origin_topic="trajectories",
        origin_partition=2,
        origin_offset=41,
        value=value,
        at_ms=at_ms,
    )
    view = view_of(letter)
    text = whole(view, view.letters[0])
    for line in (
        "group_id: (empty)",
        "sample: -1",
        "reason: decode",
        "permanent: True",
        "origin_topic: trajectories",
        "origin_partition: 2",
        "origin_offset: 41",
        f"when: {at_ms} ms UTC",
        "record at trajectories-2@41, 310 bytes:",
    ):
        assert line in text.splitlines()
    assert re.search(r"problem: .*\n  value: .*\\xff", text)
    assert f"{at_ms} ms" in table(view, view.letters)
    assert at_ms == json.loads(json_line(view, view.letters[0]))["at_ms"]


def test_a_detail_cannot_steer_the_terminal() -> None:
    """Neither in the table nor in the whole letter."""
    view = view_of(dead_letter(group_id="8", detail="at \x1b[2J"))
    assert table(view, view.letters).splitlines()[1].endswith("at \\x1b[2J")
    assert "detail: at \\x1b[2J\n" in whole(view, view.letters[0])


def test_a_json_line_has_all_but_the_bytes() -> None:
    """And what became of the group."""
    view = view_of(*letters(), groups_dropped(groups=(dropped_group("8"),)))
    fields = json.loads(json_line(view, view.letters[0]))
    assert "dropped" == fields["group"]
    assert ("8", 2, "reward", "prompts-1@17") == (
        fields["group_id"],
        fields["sample"],
        fields["reason"],
        fields["origin"],
    )
    assert len(letters()[0].value) == fields["num_bytes"]
    assert not {"key", "value"} & fields.keys()


def test_a_letter_shows_the_record_that_it_is_about() -> None:
    """Decoded where it decodes, nested records and arrays included."""
    view = view_of(*letters(), groups_dropped(groups=(dropped_group("8", detail="1 of 4"),)))
    text = whole(view, view.letters[0])
    for line in (
        "reason: reward",
        "group: dropped: stale (1 of 4)",
        "  event: Trajectory",
        "    reward: 1.0",
        "    segments[1]:",
        "      token_ids: [3] 100 101 102",
        "      behavior_logprobs: [3] -0.5 -0.5 -0.5",
    ):
        assert line in text.splitlines()
