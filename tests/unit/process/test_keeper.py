"""When a process is started again, and when it is given up."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rlstreams.streams.process.keeper import (
    FIRST_S,
    LONGEST_S,
    Ended,
    Keeper,
    Limits,
    RestartVerdict,
)

LIMIT, ROOM_S, STEADY_S = 3, 60.0, 120.0
End = tuple[Ended, bool, float, float]  # how, with headway, after living, then a pause
ENDS = st.lists(
    st.tuples(
        st.sampled_from(Ended), st.booleans(), st.floats(0.0, 2 * STEADY_S), st.floats(0.0, 100.0)
    ),
    max_size=60,
)


def played(ends: list[End]) -> list[tuple[End, float, RestartVerdict]]:
    """Each end with its time and what was done about it, up to the one that is given up."""
    keeper = Keeper(Limits(failures=LIMIT, room_s=ROOM_S, steady_s=STEADY_S))
    now_s, found = 0.0, []
    for how, has_headway, lived_s, wait_s in ends:
        now_s += lived_s
        verdict = keeper.ended(how, now_s, has_headway=has_headway, lived_s=lived_s)
        found.append(((how, has_headway, lived_s, wait_s), now_s, verdict))
        if verdict.is_over:
            break
        now_s += verdict.delay_s + wait_s
    return found


def is_headway(end: End) -> bool:
    return end[1] or end[2] >= STEADY_S


@given(ENDS)
def test_it_is_given_up_for_failures_in_a_row_alone(ends: list[End]) -> None:
    """Of which none, and nothing between them, had headway; never for kills or excuses."""
    found = played(ends)
    row: list[End] = []
    for end, _, verdict in found:
        row = [*([] if is_headway(end) else row), end]
        failures = sum(1 for one in row if one[0] is Ended.FAILED and not is_headway(one))
        assert failures == verdict.failures
        if end[0] is not Ended.NO_ROOM:
            assert verdict.is_over == (end[0] is Ended.FAILED and failures == LIMIT)
        elif verdict.is_over:
            assert verdict.room_s >= ROOM_S


@given(ENDS)
def test_what_had_headway_or_an_excuse_comes_back_at_once(ends: list[End]) -> None:
    """Anything else after a pause, which never shrinks within a row and has an upper limit."""
    last_s = 0.0
    for end, _, verdict in played(ends):
        if end[0] is Ended.EXCUSED or (is_headway(end) and end[0] is not Ended.NO_ROOM):
            assert verdict.delay_s == 0.0
            last_s = 0.0 if is_headway(end) else last_s
            continue
        last_s = 0.0 if is_headway(end) else last_s
        assert FIRST_S <= verdict.delay_s <= LONGEST_S
        assert verdict.delay_s == min(LONGEST_S, 2 * last_s) or not last_s
        last_s = verdict.delay_s


@given(ENDS)
def test_a_row_is_counted_from_its_first_death(ends: list[End]) -> None:
    begun_s, full_s = math.nan, math.nan
    for end, now_s, verdict in played(ends):
        if is_headway(end):
            begun_s = full_s = math.nan
        is_death = end[0] is not Ended.EXCUSED and (not is_headway(end) or end[0] is Ended.NO_ROOM)
        if is_death:
            begun_s = now_s if math.isnan(begun_s) else begun_s
            full_s = math.nan if end[0] is not Ended.NO_ROOM else full_s
        if end[0] is Ended.NO_ROOM:
            full_s = now_s if math.isnan(full_s) else full_s
        assert verdict.row_s == (0.0 if math.isnan(begun_s) else now_s - begun_s)
        assert verdict.room_s == (0.0 if math.isnan(full_s) else now_s - full_s)


def test_without_limits_nothing_is_given_up() -> None:
    """However long the row: its pause stays what it is."""
    keeper = Keeper(Limits())
    verdicts = [keeper.ended(Ended.FAILED, float(n)) for n in range(3000)]
    verdicts += [keeper.ended(Ended.NO_ROOM, 1e9)]
    assert not any(verdict.is_over for verdict in verdicts)
    assert [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0] == [v.delay_s for v in verdicts[:7]]
    assert LONGEST_S == verdicts[-1].delay_s


def test_room_that_was_there_ends_a_wait_for_it() -> None:
    """A disk that is full, free and full again is waited for anew."""
    keeper = Keeper(Limits(room_s=ROOM_S))
    assert not keeper.lacks_room
    assert 0.0 == keeper.ended(Ended.NO_ROOM, 0.0).room_s
    assert (True, 50.0) == (keeper.lacks_room, keeper.ended(Ended.NO_ROOM, 50.0).room_s)
    keeper.has_room()
    assert (False, False) == (keeper.lacks_room, keeper.ended(Ended.NO_ROOM, 70.0).is_over)
    assert keeper.ended(Ended.NO_ROOM, 130.0).is_over
