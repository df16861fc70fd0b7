"""What `inspect` shows of a session: its tree, what came from the log, outcomes in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.__main__ import main
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import CALLS, PROMPTS
from rlstreams.streams.sessions.figures import Said, session_figures
from rlstreams.words.dialogue import words_of
from rlstreams.words.session_text import session_lines
from rlstreams.words.spelling import NUMBERS
from tests.call_events import (
    NOW_MS,
    call_failed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.factories import prompt
from tests.random_sessions import played
from tests.unit.sessions.test_fold import call, folded
from tests.unit.streams.test_later_topics import newer_bus, recorded


def at(after_s: float, took_s: float = 0.9) -> dict[str, int]:
    """When a call was asked, and answered."""
    asked_ms = NOW_MS + round(1000 * after_s)
    return {"received_at_ms": asked_ms, "finished_at_ms": asked_ms + round(1000 * took_s)}


def test_a_session_as_text() -> None:
    session = folded(
        session_opened(worker="rollout-0"), call("a", **at(0)),
        call("b", "a", before=5, finish_reason="tool_calls", **at(1)),
        call("title", is_trained=False, why_root="message 0 differs", **at(1.5)),
        call_failed(status=429, reason="too many"),
        session_opened(start=1, at_ms=NOW_MS + 2_000, worker="rollout-1"),
        call_replayed(start=1, call_id="a"),
        call("c", "a", before=5, start=1, constrained="grammar", **at(3)),
        call("d", "c", before=10, start=1, **at(4)),
        session_closed(kind="limit", detail="4 calls"),
        outcome_reported(call_id="d", parts={"form": 0.5}, at_ms=NOW_MS + 3_500, note="fine"),
        outcome_reported(outcome_id="o2", supersedes="o1", reward=0.0, grader="judge"),
        outcome_reported(outcome_id="o3", kind="grader", grader="judge", note="timed out"),
    )  # fmt: skip
    assert list(session_lines(session_figures(session))) == [
        "session 7/1 of agent solver: limit after 2.0 s (4 calls); 2 starts, 5 calls, "
        "1 answered from the log",
        "  start 0 after 0.0 s on rollout-0: 3 calls sampled, 0 answered from the log; it was lost",
        "  start 1 after 2.0 s on rollout-1: 2 calls sampled, 1 answered from the log",
        " * #0  2 tokens (2 new) + 3, version 2, 0.90 s, stop, from the log in start 1",
        "     #1  7 tokens (2 new) + 3, version 2, 0.90 s, tool_calls, branch of #0, "
        "parallel to #2",
        " . #3  7 tokens (2 new) + 3, version 2, 0.90 s, stop, start 1, constrained by grammar",
        " * #4  12 tokens (2 new) + 3, version 2, 0.90 s, stop, start 1",
        "   #2  2 tokens (2 new) + 3, version 2, 0.90 s, stop, parallel to #1, auxiliary, "
        "message 0 differs",
        "  refused in start 0: 429 too many",
        "  sample: 40% of 15 sampled tokens are learnt from",
        "  verifier of call #4: reward 1, form 0.5, +1.5 s from the close "
        "(replaced by a later one): fine",
        "  judge: reward 0, +0.0 s from the close",
        "  judge: grader, +0.0 s from the close: timed out",
    ]


QUESTION = {"role": "user", "content": "1+2=?"}
TOOL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [TOOL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
SAME = {  # one dialogue, in each dialect that clients speak
    "chat": {"messages": [QUESTION, CALLED, RESULT]},
    "messages": {
        "max_tokens": 9,
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        ],
    },
    "responses": {
        "input": [
            QUESTION,
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
    },
}  # fmt: skip


def packed(value: object) -> bytes:
    return zstandard.compress(json.dumps(value).encode())


@pytest.mark.parametrize("dialect", SAME)
def test_what_was_said_is_what_is_new_since_the_parent(dialect: str) -> None:
    """The root shows its question, the call behind it the tool's result alone."""
    asked = SAME[dialect]
    key = "input" if dialect == "responses" else "messages"
    first = {**asked, key: asked[key][:1]}
    said = {"role": "assistant", "content": "It is 3."}
    session = folded(
        session_opened(),
        call("a", dialect=dialect, request=packed(first), response=packed(CALLED), **at(0)),
        call("b", "a", before=5, dialect=dialect, request=packed(asked), response=packed(said),
             **at(1)),
    )  # fmt: skip
    root, then = session_figures(session, words_of(NUMBERS)).calls
    assert root.asked == (Said(role="user", text="1+2=?"),)
    assert root.answer == Said(role="assistant", text="", thought="Hm.", tools=('add({"a": 1})',))
    assert then.asked == (Said(role="tool", text="3"),)
    lines = list(session_lines(session_figures(session, words_of(NUMBERS))))
    assert lines[2:4] == ["      user: 1+2=?", '      assistant: (Hm.) add({"a": 1})']


@pytest.mark.parametrize("request_", [b"", b"no zstd", packed([1]), packed({"messages": "x"})])
def test_tokens_say_what_a_request_does_not(request_: bytes) -> None:
    """A foreign writer's record is shown by its ids, behind one that can be read too."""
    session = folded(
        session_opened(),
        call("a", request=packed({"messages": [QUESTION]}), response=packed(RESULT), **at(0)),
        call("b", "a", before=5, request=request_, **at(1)),
        call("c", "b", before=10, request=packed({"messages": [QUESTION, RESULT]}), **at(2)),
    )
    _, odd, behind = session_figures(session, words_of(NUMBERS)).calls
    assert (odd.asked, odd.answer) == (
        (Said(role="prompt", text="0 1 "),),
        Said(role="assistant", text="100 101 102 "),
    )
    assert [one.role for one in behind.asked] == ["user", "tool"]


def test_inspect_shows_it_below_its_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = newer_bus()
    bus.producer("w").commit(
        [outgoing(CALLS, session_opened(), partition=1), outgoing(PROMPTS, prompt(sample=1))]
    )
    recorded(bus, tmp_path).close()
    assert main(["inspect", "7/1", str(tmp_path / "rec")]) == 0
    assert "session 7/1 of agent solver: open; 1 start, 1 call," in capsys.readouterr().out


def test_an_open_session_and_one_without_a_sample() -> None:
    open_ = list(session_lines(session_figures(folded(session_opened(), call("a"), call("b")))))
    assert open_[0] == (
        "session 7/1 of agent solver: open; 1 start, 2 calls, 0 answered from the log"
    )
    tied = session_figures(
        folded(session_opened(), call("a"), call("b", "a", before=5), call("c", "a", before=5))
    )
    assert tied.ties == 1
    assert "  sample: 67% of 9 sampled tokens are learnt from; 1 other call as deep" in list(
        session_lines(tied)
    )
    none = list(session_lines(session_figures(folded(session_opened()))))
    assert none[1:] == ["  no sample: session 7/1 has no call"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_call_is_shown_once_below_its_parent(seed: int) -> None:
    log = played(seed)
    figures = session_figures(folded(*log.calls, *log.outcomes))
    assert sorted(one.number for one in figures.calls) == list(range(len(log.committed)))
    seen: list[int] = []
    for one in figures.calls:
        assert one.parent is None or one.parent in seen
        seen.append(one.number)
    assert figures.num_replays == sum(len(one.replayed_in) for one in figures.calls)
    assert [one.outcome_id for one in figures.outcomes] == [o.outcome_id for o in log.outcomes]
