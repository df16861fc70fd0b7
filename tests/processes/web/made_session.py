"""A session of thirty calls: tools, a branch, two calls side by side, a kill, late outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import zstandard

from rlstreams.schemas.events import Event
from tests import factories
from tests.call_events import (
    NOW_MS,
    answered,
    call_committed,
    call_failed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.random_sessions import ids

NUM_CALLS = 30
KILLED_AT = 12  # the call that the agent's second start goes on behind
NEW, SAID = 4, 5  # tokens of each call
_OF: dict[str, Any] = {"session_id": "70/0", "group_id": "70"}
_TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def session_events() -> Iterator[Event]:
    """All of it, by which sample 70/0 is made."""
    yield factories.prompt(group_id="70", sample=0, text="Who wrote it?", answer="Ada")
    yield session_opened(**_OF, sample=0, worker="rollout-0")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a librarian. " * 30},
        {"role": "user", "content": "Who wrote it?"},
    ]
    for number in range(NUM_CALLS - 2):
        start = int(number > KILLED_AT)
        if number == KILLED_AT + 1:
            at_ms = _ms(number) - 200
            yield session_opened(**_OF, sample=0, start=1, at_ms=at_ms, worker="rollout-1")
            for before in range(number):
                yield call_replayed(**_OF, start=1, call_id=f"c{before}", at_ms=at_ms)
        answer = _answer(number)
        yield _call(number, messages, answer, start=start)
        messages = [*messages, answer, _result(number)]
    asked = [messages[0], {"role": "user", "content": "Give this conversation a title."}]
    title = {"role": "assistant", "content": "On <b>authors</b>"}
    yield _call(28, asked, title, start=1, parent=None, why_root="no call's messages begin these",
                received_at_ms=_ms(27) + 100, is_trained=False)  # fmt: skip
    again = {"role": "assistant", "content": "Another thought."}
    yield _call(29, messages[:8], again, start=1, parent=2, received_at_ms=_ms(29))
    yield call_failed(**_OF, start=1, status=400, reason="temperature must be text")
    yield session_closed(**_OF, sample=0, start=1, num_calls=NUM_CALLS, at_ms=_ms(30))
    yield outcome_reported(**_OF, grader="agent", reward=0.0, at_ms=_ms(29), note="I gave up")
    yield outcome_reported(**_OF, outcome_id="o2", supersedes="o1", grader="agent",
                           parts={"form": 0.5}, at_ms=_ms(30))  # fmt: skip
    yield outcome_reported(**_OF, outcome_id="o3", grader="human", reward=0.5, at_ms=_ms(90),
                           note="Right, but slow.")  # fmt: skip


def _ms(number: int) -> int:
    return NOW_MS + 1_000 * number


def _answer(number: int) -> dict[str, Any]:
    if number == NUM_CALLS - 3:
        return {"role": "assistant", "content": "Ada wrote it.", "reasoning_content": "I see it."}
    function = {"name": "search", "arguments": json.dumps({"page": number})}
    call = {"id": f"t{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": f"I look at page {number}.", "tool_calls": [call]}


def _result(number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"t{number}",
        "content": f"Page {number}: " + "x " * 500,
    }


def _call(
    number: int, messages: list[dict[str, Any]], answer: dict[str, Any], **more: Any
) -> Event:
    parent = more.pop("parent", number - 1 if number else None)
    before = 0 if parent is None else (parent + 1) * (NEW + SAID)
    received_ms = more.pop("received_at_ms", _ms(number))
    return call_committed(
        **_OF,
        call_id=f"c{number}",
        request_hash=f"h{number}",
        ordinal=number,
        parent=None if parent is None else f"c{parent}",
        prompt_tokens=before + NEW,
        new_ids=ids(list(range(10, 10 + NEW))),
        segments=(answered(SAID, version=number // 10, start=10),),
        request=_packed({"messages": messages, "tools": _TOOLS}),
        response=_packed(answer),
        received_at_ms=received_ms,
        finished_at_ms=received_ms + 700,
        **more,
    )


def _packed(value: object) -> bytes:
    return zstandard.compress(json.dumps(value).encode())
