"""What graders have said of a session, together."""

from __future__ import annotations

from typing import Any

import pytest

from rlstreams.streams.sessions.verdict import Verdict, verdict_of
from tests.call_events import outcome_reported, session_closed
from tests.unit.sessions.test_fold import call, folded

BOTH = ("human", "judge")


def said(name: str, grader: str, reward: float = 1.0, **more: Any) -> Any:
    return outcome_reported(outcome_id=name, grader=grader, reward=reward, **more)


def verdict(*outcomes: Any, graders: tuple[str, ...] = BOTH, is_over: bool = False) -> Any:
    return verdict_of(folded(call("a"), session_closed(), *outcomes), graders, is_over=is_over)


def test_rewards_are_added_once_all_have_spoken() -> None:
    first = said("o1", "human", 0.5, parts={"form": 0.25}, note="neat", call_id="a")
    second = said("o2", "judge", 2.0, note="right")
    assert verdict(first, said("o0", "verifier", 9.0)) is None
    assert verdict(first, second) == Verdict(
        kind="reward",
        reward=2.5,
        parts={"human": 0.5, "judge": 2.0, "human.form": 0.25},
        note="neat; right",
        terminal="a",
    )
    alone = verdict(first, graders=("human",))
    assert (alone.reward, alone.parts) == (0.5, {"form": 0.25})


def test_the_newest_that_stands_counts() -> None:
    revised = [said("o1", "human", 0.0), said("o2", "human", 1.0, supersedes="o1")]
    assert verdict(*revised, graders=("human",)).reward == 1.0
    assert verdict(*reversed(revised), graders=("human",)).reward == 0.0


def test_nobody_waits_for_ever() -> None:
    late = verdict(said("o1", "human"), is_over=True)
    assert (late.kind, late.missing, late.note) == ("expired", ("judge",), "no outcome by judge")
    assert verdict(said("o1", "human"), said("o2", "judge"), is_over=True).kind == "reward"


def test_a_grader_that_failed_is_no_zero() -> None:
    failed = verdict(said("o1", "human", kind="grader", note="away"))
    assert (failed.kind, failed.note, failed.missing) == ("grader", "human: grader away", ())
    mended = said("o2", "human", supersedes="o1")
    both = (said("o1", "human", kind="grader"), mended, said("o3", "judge"))
    assert verdict(*both).kind == "reward"


@pytest.mark.parametrize("is_over", [True, False])
def test_without_graders_there_is_nothing_to_wait_for(is_over: bool) -> None:
    found = verdict(graders=(), is_over=is_over)
    assert (found.kind, found.reward) == ("reward", 0.0)
