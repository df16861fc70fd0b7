"""The same request in other spellings is the same; whatever reaches the prompt makes another."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from rlstreams.workers.gateway.canonical import Matcher, answer_message, call_id, plain, plain_tool
from rlstreams.workers.gateway.port import CallRefusedError, CallRequest, Parsed, ToolCall

STRICT = Matcher()


def called(arguments: object, name: str = "add", call: str = "c1", content: object = None) -> Any:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": call, "type": "function", "function": function}],
    }


def told(content: object, call: str = "c1") -> Any:
    return {"role": "tool", "tool_call_id": call, "content": content}


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
BASE = CallRequest(
    dialect="chat",
    body=b"{}",
    messages=(
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+2"},
        called('{"a": 1, "b": 2}'),
        told("3"),
    ),
    tools=(TOOL,),
    max_tokens=16,
    stop=("\n",),
)


def with_message(number: int, message: object) -> CallRequest:
    messages = list(BASE.messages)
    messages[number] = message
    return replace(BASE, messages=tuple(messages))


SAME = {
    "developer": with_message(0, {"role": "developer", "content": "be brief"}),
    "parts": with_message(1, {"role": "user", "content": [{"type": "text", "text": "1+2"}]}),
    "input_text": with_message(
        1, {"role": "user", "content": [{"type": "input_text", "text": "1+2"}]}
    ),
    "spaces": with_message(2, called('{"a":1,"b":2}')),
    "key order": with_message(2, called('{"b": 2, "a": 1}')),
    "object": with_message(2, called({"a": 1, "b": 2})),
    "empty content": with_message(2, called('{"a": 1, "b": 2}', content="")),
    "no parts": with_message(2, called('{"a": 1, "b": 2}', content=[])),
    "other ids": replace(
        BASE, messages=(*BASE.messages[:2], called('{"a":1,"b":2}', call="z"), told("3", "z"))
    ),
    "cache control": with_message(
        1, {"role": "user", "content": [{"type": "text", "text": "1+2", "cache_control": {"a": 1}}]}
    ),
    "temperature": replace(BASE, requested={"temperature": 0.1, "seed": 3}),
    "dialect": replace(BASE, dialect="messages", body=b"other"),
    "retry": replace(BASE, retry=2, model="small"),
    "strict of a tool": replace(
        BASE, tools=({**TOOL, "function": {**TOOL["function"], "strict": True}},)
    ),
}
OTHER = {
    "text": with_message(1, {"role": "user", "content": "1+3"}),
    "a space": with_message(1, {"role": "user", "content": "1+2 "}),
    "role": with_message(0, {"role": "user", "content": "be brief"}),
    "name": with_message(1, {"role": "user", "content": "1+2", "name": "bob"}),
    "argument": with_message(2, called('{"a": 1, "b": 3}')),
    "argument's type": with_message(2, called('{"a": "1", "b": 2}')),
    "function": with_message(2, called('{"a": 1, "b": 2}', name="sub")),
    "said beside a call": with_message(2, called('{"a": 1, "b": 2}', content="I add")),
    "thought": with_message(2, {**called('{"a": 1, "b": 2}'), "reasoning_content": "hm"}),
    "unknown id": with_message(3, told("3", "c9")),
    "tool's text": with_message(3, told("4")),
    "a message less": replace(BASE, messages=BASE.messages[:3]),
    "max_tokens": replace(BASE, max_tokens=17),
    "no max_tokens": replace(BASE, max_tokens=None),
    "stop": replace(BASE, stop=()),
    "tools": replace(BASE, tools=()),
    "description": replace(
        BASE, tools=({**TOOL, "function": {**TOOL["function"], "description": "x"}},)
    ),
    "choice": replace(BASE, choice=1),
    "constrained": replace(BASE, constrained="response_format"),
    "auxiliary": replace(BASE, is_trained=False),
}


@pytest.mark.parametrize("name", SAME)
def test_other_spellings_are_the_same_request(name: str) -> None:
    assert STRICT.request_hash(SAME[name]) == STRICT.request_hash(BASE)


@pytest.mark.parametrize("name", OTHER)
def test_whatever_reaches_the_prompt_makes_another(name: str) -> None:
    assert STRICT.request_hash(OTHER[name]) != STRICT.request_hash(BASE)


def test_the_hash_is_the_same_in_every_process() -> None:
    """It stands in the log: this text of it must never change without a reason."""
    assert STRICT.request_hash(BASE) == HASH
    assert call_id("7/3", HASH, 0) != call_id("7/3", HASH, 1) != call_id("7/4", HASH, 1)
    assert re.fullmatch("[0-9a-f]{32}", call_id("7/3", HASH, 0))


HASH = "854d13ad36433a3f6db8357355635276d0d784dff98e40f303a20c07ed0b223d"


def test_a_date_makes_another_request_unless_it_is_ignored() -> None:
    first, later = (
        with_message(0, {"role": "system", "content": f"Today is 2026-11-{day}. Be brief."})
        for day in (26, 27)
    )
    assert STRICT.request_hash(first) != STRICT.request_hash(later)
    loose = Matcher([r"\d{4}-\d\d-\d\d"])
    assert loose.request_hash(first) == loose.request_hash(later)
    assert loose.request_hash(first) != loose.request_hash(BASE)


def test_a_chain_finds_the_call_that_a_request_continues() -> None:
    """Request and answer of a call are a beginning of the next request, however it is spelt."""
    asked = BASE.messages[:2]
    answer = Parsed(
        content="",
        reasoning="a thought that no agent sends back",
        tool_calls=(ToolCall(id="call-1", name="add", arguments='{"b":2,"a":1}'),),
    )
    [*_, said] = STRICT.spelled((*asked, answer_message(answer)), BASE.tools).chain
    chain = STRICT.spelled(BASE.messages, BASE.tools).chain
    assert len(chain) == 1 + len(BASE.messages)
    assert chain.index(said) == 3
    assert said not in STRICT.spelled(BASE.messages).chain  # without tools: another prompt
    assert said not in STRICT.spelled(OTHER["argument"].messages, BASE.tools).chain
    assert said not in STRICT.spelled(OTHER["text"].messages, BASE.tools).chain


def test_an_answer_that_an_agent_has_stripped_is_found_again() -> None:
    asked = ({"role": "user", "content": "1"},)
    said = STRICT.spelled((*asked, answer_message(Parsed(content="\n2 ")))).chain[-1]
    assert STRICT.spelled((*asked, {"role": "assistant", "content": "2"})).chain[-1] == said
    spaced = STRICT.spelled(({"role": "user", "content": "1 "},)).chain
    assert spaced[-1] != STRICT.spelled(asked).chain[-1]


def test_repeated_ids_of_tool_calls_name_the_newest() -> None:
    """Some agents call each of them `call_0`."""
    repeated = (called("{}", call="x"), told("1", "x"), called("{}", call="x"), told("2", "x"))
    fresh = (called("{}", call="x"), told("1", "x"), called("{}", call="y"), told("2", "y"))
    swapped = (called("{}", call="x"), told("1", "x"), called("{}", call="y"), told("2", "x"))
    hashes = [STRICT.request_hash(replace(BASE, messages=m)) for m in (repeated, fresh, swapped)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "m.role"),
        ({"role": "robot", "content": "x"}, "m.role"),
        ({"role": ["user"], "content": "x"}, "m.role"),
        ({"role": "user", "content": 5}, "m.content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "m.content[0].type"),
        ({"role": "user", "content": ["x"]}, "m.content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "m.content[0].text"),
        ({"role": "assistant", "tool_calls": "x"}, "m.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "m.tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "m.tool_calls[0].function.name"),
    ],
)
def test_what_no_template_can_take_is_named(message: dict[str, object], param: str) -> None:
    with pytest.raises(CallRefusedError, match=re.escape(param)) as refused:
        plain(message, "m")
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("arguments", ['"5"', "5", "[1]", "not JSON", '{"a": "\\ud800"}', ""])
def test_plain_is_plain_already(arguments: str) -> None:
    """Whatever a model wrote as arguments; and every spelling has a hash."""
    once = plain(called(arguments))
    assert plain(once) == once
    assert json.dumps(once)
    assert STRICT.request_hash(with_message(2, once)) == STRICT.request_hash(
        with_message(2, called(arguments))
    )


def test_what_is_spelled_behind_an_earlier_request_is_as_if_it_were_spelled_alone() -> None:
    """Whatever changed before: a dialogue that goes on, one that was rewritten, another tool, and
    what Python takes for equal."""

    def called(arguments: str) -> dict[str, object]:
        return {
            "role": "assistant",
            "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}],
        }

    result = {"role": "tool", "tool_call_id": "x", "content": "7"}
    asked = {"role": "user", "content": "1"}
    dialogues = [
        (asked,),
        (asked, called('{"a": 1}'), result),
        (asked, called('{"a": 1}'), result, called('{"a": 1}'), result),
        (asked, called('{"a": true}'), result, called('{"a": 1}'), result, asked),
        (asked, called('{"a": 1.0}'), result),
        (result, asked, {"role": "assistant", "content": " b ", "reasoning_content": "c"}, asked),
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    for messages in dialogues:
        for tools in ((), (tool,)):
            alone = STRICT.spelled([plain(m) for m in messages], tools)
            for earlier in dialogues:
                for others in ((), (tool,)):
                    before = STRICT.spelled([plain(m) for m in earlier], others)
                    assert alone == STRICT.spelled([plain(m) for m in messages], tools, before)
    texts = {STRICT.spelled(messages).texts for messages in dialogues}
    assert len(texts) == len(dialogues)


def test_half_of_a_character_reaches_no_template() -> None:
    """No tokenizer takes one: an escape stands in its place, in each text that templates show."""
    half, said = "1\ud83d", "1\\ud83d"
    for content in (half, [{"type": "text", "text": half}]):
        assert plain({"role": "user", "content": content})["content"] == said
    for arguments in ({half: [half]}, json.dumps({half: [half]})):
        answer = {**called(arguments), "reasoning_content": half}
        made = plain(answer)
        assert made["reasoning_content"] == said
        assert made["tool_calls"][0]["function"]["arguments"] == {said: [said]}
    assert plain(called(half + "{"))["tool_calls"][0]["function"]["arguments"] == said + "{"
    tool = {"type": "function", "function": {"name": "f", "description": half}}
    assert plain_tool(tool)["function"]["description"] == said
