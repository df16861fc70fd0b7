"""What a client is told of an answer: its text up to a stop string, and the text of its tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlstreams.streams.sessions.session import Session
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.gateway.canonical import Matcher
from rlstreams.workers.gateway.dialogue import Dialogue
from rlstreams.workers.gateway.port import CallAnswer
from rlstreams.workers.gateway.template import TemplateRenderer
from tests.call_events import session_opened
from tests.chat_tokenizer import chat_tokenizer
from tests.unit.roles.sessions_stand import request_of
from tests.unit.sessions.test_fold import call, folded

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read(folder: Path, text: str, stop: tuple[str, ...] = ()) -> CallAnswer:
    """The answer of a text that a policy has sampled, byte by byte."""
    tokenizer = chat_tokenizer(folder)
    shared: Any = SimpleNamespace(tokenizer=tokenizer, renderer=TemplateRenderer(tokenizer))
    dialogue = Dialogue(shared, Session(session_id="0/0"), Sampling(max_new_tokens=6), Matcher())
    request = request_of([], stop=stop, tools=(TOOL,))
    return dialogue.read(request, np.array([], np.int32), tokenizer.encode(text), False, "id")


@pytest.mark.parametrize("order", ["abcd", "abdc", "dcba", "cbda", "acac"])
def test_a_call_is_continued_behind_what_it_saw(order: str) -> None:
    """Whichever call was continued before: the one it follows, a fork of that, or a root."""
    session = folded(
        session_opened(),
        call("a"),
        call("b", "a", before=5),
        call("c", "b", before=10, new=1, said=2),
        call("d", "a", before=5, new=1, said=4),
    )
    given = list[list[int]]()

    def bridge(before: list[int], said: list[int], *_: Any) -> list[int]:
        given.append([*before, *said])
        return [7]

    shared: Any = SimpleNamespace(renderer=SimpleNamespace(bridge=bridge))
    dialogue = Dialogue(shared, session, Sampling(max_new_tokens=6), Matcher())
    for number, name in enumerate(order):
        found, _ = dialogue._parent(request_of([]), 0, name)
        assert found is not None
        assert session.tokens_of(name).tolist() == found[1].tolist() == given[number]


@pytest.mark.parametrize(
    ("sampled", "stop", "content", "reasoning", "told"),
    [
        ("one\nEND\n", "\nEND\n", "one", "", True),  # the parser takes the last line's end
        ("one\n", "\n", "one", "", True),
        ("one END", "END", "one ", "", True),
        ("<think>so: END", "END", "", "so: ", True),  # within a thought
        ("<think>so</think>two STOP", "STOP", "two ", "so", True),
        ("one", "END", "one", "", False),
    ],
)
def test_a_stop_string_is_told_and_is_no_part_of_the_answer(
    tmp_path: Path, sampled: str, stop: str, content: str, reasoning: str, told: bool
) -> None:
    answer = read(tmp_path, sampled, (stop,))
    assert (answer.parsed.content, answer.parsed.reasoning) == (content, reasoning)
    assert (answer.stopped_by, answer.finish_reason) == (stop if told else "", "stop")


def test_a_call_of_a_tool_that_a_stop_string_ends_is_one(tmp_path: Path) -> None:
    """Its client runs the tool: to Anthropic's an end by a stop string would be none."""
    answer = read(tmp_path, '<tool_call>{"name": "add"}</tool_call>', ("</tool_call>",))
    assert (answer.finish_reason, answer.stopped_by) == ("tool_calls", "")
    assert [call.name for call in answer.parsed.tool_calls] == ["add"]


def test_tokens_are_told_as_text(tmp_path: Path) -> None:
    """Vocabularies write a space and the bytes of other letters in letters of their own."""
    assert read(tmp_path, "a é").tokens == ("a", " ", "\ufffd", "\ufffd")
