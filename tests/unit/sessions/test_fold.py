"""The one fold of sessions, against plain lists and against what went wrong in other systems."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import CallCommitted
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session
from tests.call_events import (
    answered,
    call_committed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.factories import prompt
from tests.random_sessions import Played, ids, interleaved, played

seeds = st.integers(0, 2**32)


def folded(*events: Any) -> Session:
    log = SessionLog()
    for offset, event in enumerate(events):
        log.apply(event, offset)
    found = log.get(events[0].session_id)
    assert found is not None
    return found


def call(name: str, parent: str | None = None, new: int = 2, said: int = 3, **more: Any) -> Any:
    """A call whose numbers fit a parent of as many tokens, or the whole prompt of a root."""
    before = more.pop("before", 0)
    return call_committed(
        call_id=name,
        parent=parent,
        prompt_tokens=before + new,
        new_ids=ids(list(range(new))),
        segments=(answered(said),),
        **{"request_hash": name, **more},
    )


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_a_path_is_what_the_model_saw(seed: int) -> None:
    """Whatever copies follow, and whichever topic is read first."""
    log = played(seed)
    session = folded(*interleaved(log, random.Random(seed)))
    assert [c.call_id for c in session.calls] == [c.call_id for c in log.committed]
    for name, saw in log.saw.items():
        node = session.nodes[name]
        assert (session.tokens_of(name).tolist(), node.end) == (saw, len(saw))
        assert (node.parent and node.parent.call.call_id) == log.parent[name]
        assert node.problem == ""


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_requests_are_found_and_counted_as_a_plain_replay_does(seed: int) -> None:
    log = played(seed)
    session = folded(*interleaved(log, random.Random(seed)))
    found = {name: session.recorded(*name) for name in log.recorded}
    assert {name: c and c.call_id for name, c in found.items()} == log.recorded
    assert all(isinstance(c, CallCommitted) and c in log.committed for c in found.values())
    assert session.recorded("a", 99) is None
    answered = {
        (s, r): session.answered_occurrences(s, r) for s in range(log.num_starts) for r in "abc"
    }
    assert answered == {name: set(range(log.asked[name])) for name in answered}
    assert session.num_starts == log.num_starts


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_outcomes_stand_until_a_later_one_takes_their_place(seed: int) -> None:
    log = played(seed)
    session = folded(*interleaved(log, random.Random(seed)))
    taken = {o.supersedes for o in log.outcomes}
    standing = [o for o in log.outcomes if o.outcome_id not in taken]
    assert session.standing == standing
    assert session.terminal == next((o.call_id for o in reversed(standing) if o.call_id), None)


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_copies_change_nothing(seed: int) -> None:
    log: Played = played(seed)
    plain = folded(*log.calls, *log.outcomes)
    copied = folded(*interleaved(log, random.Random(seed)))
    for name in ("starts", "closed", "failed", "replays", "calls", "outcomes", "standing"):
        assert getattr(copied, name) == getattr(plain, name)


def test_what_is_forgotten_does_not_begin_anew() -> None:
    log = SessionLog()
    for number in ("1", "300", "007"):
        log.apply(session_opened(session_id=f"7/{number}"))
    log.apply(session_opened(session_id="stranger"))
    for name in [session.session_id for session in log]:
        log.forget(name)
    log.forget("8/0")
    assert (len(log.sessions), log.num_forgotten) == (0, 4)
    assert not log.apply(session_opened(session_id="7/1", start=1))
    assert [log.is_forgotten(n) for n in ("7/1", "7/300", "7/007", "stranger", "7/7", "8/0")] == [
        True, True, True, True, False, False,
    ]  # fmt: skip
    assert log.apply(session_opened(session_id="7/7"))


def test_other_events_are_none_of_its_business() -> None:
    log = SessionLog()
    assert not log.apply(prompt())
    assert log.sessions == {}


def test_no_call_counts_behind_the_close_and_outcomes_do() -> None:
    session = folded(
        session_opened(), call("a"), session_closed(), call("b"), session_closed(kind="agent"),
        call_replayed(call_id="a", start=1), outcome_reported(),
    )  # fmt: skip
    assert (list(session.nodes), session.replays) == (["a"], {})
    assert session.closed is not None
    assert session.closed.kind == "ended"
    assert list(session.outcomes) == ["o1"]


def test_it_knows_where_its_records_begin() -> None:
    """An outcome lies in another topic: its offset is none of `calls`."""
    session = folded(outcome_reported(), session_opened(), call("a"))
    assert (session.first_offset, session.nodes["a"].offset) == (1, 2)


@pytest.mark.parametrize(
    ("child", "problem"),
    [
        (call("b", "a", before=5), ""),
        (call("b", "a", before=4), "its prompt has 6 tokens, its parent a ends at 5 and 2 are new"),
        (call("b", "z", before=5), "its parent z is not there before it"),
        (call("b", "b", before=5), "its parent b is not there before it"),
        (call("b", before=5), "a root of 7 prompt tokens has 2 of them"),
        (call("b", "z"), ""),  # its whole prompt is there
    ],
)
def test_a_link_that_does_not_hold_is_a_root(child: Any, problem: str) -> None:
    """And says so of all that continues it: nobody knows what the model saw."""
    session = folded(call("a"), child, call("c", "b", before=child.prompt_tokens + 3))
    b, c = session.nodes["b"], session.nodes["c"]
    assert (b.problem, c.parent) == (problem, b)
    assert (b.parent is not None) == (child.parent == "a" and not problem)
    if problem:
        assert c.problem == f"its parent's: {problem}"
        with pytest.raises(ValueError, match="call c of session 7/1: its parent's"):
            session.tokens_of("c")


def test_a_body_that_repeats_is_answered_by_its_own_occurrence() -> None:
    """A hash alone is no proof of a retry: a compaction that gives the same notes twice asks the
    same request twice, and the second answer is another one."""
    session = folded(
        session_opened(),
        call("first", request_hash="h", occurrence=0),
        call("second", request_hash="h", occurrence=1),
        session_opened(start=1),
        call_replayed(start=1, call_id="first"),
    )
    found = [session.recorded("h", n) for n in range(3)]
    assert [c and c.call_id for c in found] == ["first", "second", None]
    found = [session.answered_occurrences(start, "h") for start in range(3)]
    assert found == [{0, 1}, {0}, set()]


def test_a_changed_system_prompt_is_a_root_of_its_own_and_names_why() -> None:
    """A date in it breaks the prefix: no fuzzy match makes two prompts one."""
    session = folded(call("a"), call("b", None, new=9, why_root="message 0 differs"))
    assert [node.parent for node in session.nodes.values()] == [None, None]
    assert session.calls[1].why_root == "message 0 differs"


def test_rewritten_arguments_do_not_change_the_ids() -> None:
    """Parents are by id, and a path's tokens are those that were sampled: how the agent spells
    them in its next request changes nothing."""
    session = folded(
        call("a", request=b"{}", response=b'{"arguments": "{\\"a\\": 1}"}'),
        call("b", "a", before=5, request=b'{"arguments": "{\\"a\\":1}"}'),
    )
    assert session.tokens_of("b")[2:5].tolist() == answered(3).token_ids.numpy().tolist()


def test_identical_siblings_are_two_calls() -> None:
    session = folded(
        call("a"), call("b", "a", before=5), call("c", "a", before=5), call("d", "c", before=10)
    )
    assert [n.call.call_id for n in session.nodes["d"].path] == ["a", "c", "d"]


def test_a_child_before_its_parent_is_a_root() -> None:
    session = folded(call("b", "a", before=5), call("a"))
    assert session.nodes["b"].parent is None
    assert session.nodes["b"].problem == "its parent a is not there before it"
    assert session.nodes["a"].problem == ""


def test_a_call_without_tokens_is_nobodys_parent() -> None:
    """Every prompt begins with nothing."""
    session = folded(call("a", new=0, said=0), call("b", "a"))
    assert (session.nodes["b"].parent, session.nodes["b"].problem) == (None, "")


def test_a_replay_of_no_call_counts_as_none() -> None:
    session = folded(call("a"), call_replayed(call_id="z"), call_replayed(call_id="a", start=0))
    assert session.replays == {}
    assert session.answered_occurrences(0, "a") == {0}
