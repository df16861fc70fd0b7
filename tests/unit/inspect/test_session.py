"""What `inspect` shows of a session: its tree, what came from the log, outcomes in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.__main__ import main
from rlstreams.debug.inspect.session_text import session_lines
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import CALLS, PROMPTS
from rlstreams.streams.sessions.figures import session_figures
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


def test_a_session_as_text() -> None:
    session = folded(
        session_opened(), call("a"), call("b", "a", before=5, finish_reason="tool_calls"),
        call_failed(status=429, reason="too many"),
        session_opened(start=1), call_replayed(start=1, call_id="a"),
        call("c", "a", before=5, start=1, constrained="grammar"),
        call("d", "c", before=10, start=1),
        call("title", is_trained=False, why_root="message 0 differs"),
        session_closed(kind="limit", detail="4 calls"),
        outcome_reported(call_id="d", parts={"form": 0.5}, at_ms=NOW_MS + 3_500, note="fine"),
        outcome_reported(outcome_id="o2", supersedes="o1", reward=0.0, grader="judge"),
        outcome_reported(outcome_id="o3", kind="grader", grader="judge", note="timed out"),
    )  # fmt: skip
    assert list(session_lines(session_figures(session))) == [
        "session 7/1 of agent solver: limit after 2.0 s (4 calls); 2 starts, 5 calls, "
        "1 answered from the log",
        " * #0  2 tokens (2 new) + 3, version 2, 0.90 s, stop, from the log in start 1",
        "     #1  7 tokens (2 new) + 3, version 2, 0.90 s, tool_calls",
        " .   #2  7 tokens (2 new) + 3, version 2, 0.90 s, stop, start 1, constrained by grammar",
        " *     #3  12 tokens (2 new) + 3, version 2, 0.90 s, stop, start 1",
        "   #4  2 tokens (2 new) + 3, version 2, 0.90 s, stop, auxiliary, message 0 differs",
        "  refused in start 0: 429 too many",
        "  sample: 40% of 15 sampled tokens are learnt from",
        "  verifier of call #3: reward 1, form 0.5, +1.5 s from the close "
        "(replaced by a later one): fine",
        "  judge: reward 0, +0.0 s from the close",
        "  judge: grader, +0.0 s from the close: timed out",
    ]


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
