"""The clients that agents are made of, unchanged, against the gateway."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rlstreams.workers.gateway.port import (
    CallAnswer,
    CallRefusedError,
    CallRequest,
    Parsed,
    ToolCall,
)
from tests.fake_calls import CREATED_S
from tests.gateways import Running, gateway
from tests.late import Late

anthropic, openai = Late("anthropic"), Late("openai")

TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CHAT_TOOL = {"type": "function", "function": TOOL}
FLAT_TOOL = {"type": "function", **TOOL}
ANTHROPIC_TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": TOOL["parameters"],
}


def says(request: CallRequest) -> Parsed | CallAnswer:
    """Calls a tool first, then says what it told; a few words make it say something else."""
    last = request.messages[-1]
    said = str(last["content"])
    if said == "cut":
        return CallAnswer(
            call_id="ab" * 16, created_s=CREATED_S, parsed=Parsed(content="b"),
            finish_reason="length", prompt_tokens=3, tokens=("b",), logprobs=(-1.0,),
        )  # fmt: skip
    if said == "stop":
        answer = says(replace(request, messages=({"role": "user", "content": "cut"},)))
        assert isinstance(answer, CallAnswer)
        return replace(answer, finish_reason="stop", stopped_by="X")
    if said == "empty":
        return Parsed(content="")
    if said == "busy":
        raise CallRefusedError(429, "busy", "no room", retry_after_s=0.01)
    if said == "bug":
        raise KeyError("a mistake of ours")
    if request.tools and last["role"] != "tool":
        call = ToolCall(id="call_1", name="look", arguments='{"at": "é"}')
        return Parsed(content="", reasoning="hm", tool_calls=(call,))
    return Parsed(content=f"told {said}", reasoning="hm" if request.tools else "")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with gateway(says, keepalive_s=0.2) as made:
        yield made


@pytest.fixture
def chat(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key()) as client:
        yield client


@pytest.fixture
def claude(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key=running.key("7/4")) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- chat completions


def test_chat_goes_round_a_tool(chat: openai.OpenAI, running: Running) -> None:
    messages = user("go")
    first = chat.chat.completions.create(model="x/fake", messages=messages, tools=[CHAT_TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    said = first.choices[0].message
    assert said.content is None
    assert json.loads(said.tool_calls[0].function.arguments) == {"at": "é"}
    back = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "found"}
    messages += [said.model_dump(exclude_none=True), back]
    second = chat.chat.completions.create(model="fake", messages=messages, tools=[CHAT_TOOL])
    assert second.choices[0].message.content == "told found"
    assert second.created == CREATED_S
    seen = running.calls.requests[-1]
    assert [m["role"] for m in seen.messages] == ["user", "assistant", "tool"]
    assert seen.messages[1]["reasoning_content"] == "hm"
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert second.usage.prompt_tokens_details is not None


def test_a_chat_stream_says_the_same(chat: openai.OpenAI) -> None:
    for tools, text in (([CHAT_TOOL], "stream a tool"), ([], "stream")):
        asked = {"model": "m", "messages": user(text), "tools": tools}
        whole = chat.chat.completions.create(**asked, n=1, extra_headers={"x": "1"})
        with chat.chat.completions.stream(
            **{**asked, "tools": tools or openai.omit}, stream_options={"include_usage": True}
        ) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.content == whole.choices[0].message.content
        assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
        calls, streamed_calls = (
            [(c.id, c.function.name, c.function.arguments) for c in made.tool_calls or []]
            for made in (whole.choices[0].message, streamed.choices[0].message)
        )
        assert calls == streamed_calls
        assert streamed.usage == whole.usage


def test_choices_logprobs_and_stop(chat: openai.OpenAI, running: Running) -> None:
    made = chat.chat.completions.create(
        model="m", messages=user("a b"), n=3, logprobs=True, top_logprobs=2, stop=["\n"],
        temperature=0.1, seed=5, max_completion_tokens=64_000,
    )  # fmt: skip
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    content = made.choices[2].logprobs.content
    assert [(t.token, t.logprob) for t in content] == [("told", -0.5), ("a", -0.5), ("b", -0.5)]
    assert bytes(content[0].bytes) == b"told"
    assert made.usage.completion_tokens == 9
    seen = running.calls.requests[-3:]
    assert sorted(request.choice for request in seen) == [0, 1, 2]
    assert {(r.stop, r.max_tokens) for r in seen} == {(("\n",), 64_000)}
    raw = chat.chat.completions.with_raw_response.create(
        model="m", messages=user("c"), temperature=0.1
    )
    assert json.loads(raw.headers["x-rlstreams-overruled"]) == {"temperature": 0.1}
    cut = chat.chat.completions.create(model="m", messages=user("cut"))
    assert cut.choices[0].finish_reason == "length"
    assert cut.id == "chatcmpl-" + "ab" * 16


def test_models_say_how_long_a_sequence_may_be(chat: openai.OpenAI) -> None:
    [model] = chat.models.list().data
    assert (model.id, model.max_model_len) == ("fake", 1000)
    assert chat.models.retrieve("org/fake").max_model_len == 1000


# --- what clients do when something goes wrong


def test_a_client_that_times_out_is_given_the_same_call(running: Running) -> None:
    """Its tries are byte-equal and marked: one sample, however often it hangs up."""
    before = len(running.calls.requests)
    running.hold()
    threading.Timer(1.0, lambda: running.hold(False)).start()
    with openai.OpenAI(
        base_url=f"{running.url}/v1", api_key=running.key("8/0"), timeout=0.3, max_retries=9
    ) as client:
        made = client.chat.completions.create(model="m", messages=user("slow"))
    assert made.choices[0].message.content == "told slow"
    assert len(running.calls.requests) == before + 1


@pytest.mark.parametrize(
    ("text", "error", "sampled"),
    [
        ("busy", "RateLimitError", 3),  # tried again, as it was told
        ("bug", "InternalServerError", 3),
        ("word " * 1000, "BadRequestError", 0),
    ],
)
def test_a_refusal_has_the_clients_own_type(
    chat: openai.OpenAI, running: Running, text: str, error: str, sampled: int
) -> None:
    before = len(running.calls.requests)
    with pytest.raises(getattr(openai, error)) as refused:
        chat.chat.completions.create(model="m", messages=user(text))
    assert len(running.calls.requests) == before + sampled
    assert refused.value.body["message"]
    assert "a mistake of ours" not in str(refused.value)  # it may hold the request's words


def test_a_closed_session_is_not_tried_again(running: Running) -> None:
    key = running.key("9/0")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key) as client:
        client.post("/close", body={"kind": "ended"}, cast_to=object)
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(model="m", messages=user("a"))
    assert (refused.value.status_code, refused.value.code) == (410, "session_closed")
    assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"
    with (
        anthropic.Anthropic(base_url=running.url, api_key=key) as claude,
        pytest.raises(anthropic.APIStatusError) as refused,
    ):
        claude.messages.create(model="m", max_tokens=5, messages=user("a"))
    assert refused.value.status_code == 410
    assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"


@pytest.mark.parametrize("key", ["sk-wrong", "rls-AAAA"])
def test_a_key_that_is_none_of_ours(running: Running, key: str) -> None:
    chat = openai.OpenAI(base_url=f"{running.url}/v1", api_key=key)
    with chat, pytest.raises(openai.AuthenticationError):
        chat.chat.completions.create(model="m", messages=user("a"))
    claude = anthropic.Anthropic(base_url=running.url, api_key=key)
    with claude, pytest.raises(anthropic.AuthenticationError):
        claude.messages.create(model="m", max_tokens=5, messages=user("a"))


def test_a_key_in_the_path_wins(running: Running) -> None:
    """For agents that are made to send another one."""
    base = f"{running.url}/sessions/{running.key('10/0')}/v1"
    with openai.OpenAI(base_url=base, api_key="sk-of-something-else") as client:
        made = client.chat.completions.create(
            model="m", messages=user("a"), extra_headers={"x-session-id": "my own"}
        )
    assert made.choices[0].message.content == "told a"


def test_an_agent_that_starts_anew_is_told_the_same_word_for_word(running: Running) -> None:
    bodies = []
    for start in (0, 1):
        with openai.OpenAI(
            base_url=f"{running.url}/v1", api_key=running.key("11/0", start)
        ) as client:
            for stream in (False, True):
                raw = client.chat.completions.with_raw_response.create(
                    model="m", messages=user(f"again {stream}"), tools=[CHAT_TOOL], stream=stream
                )
                bodies.append(raw.http_response.read())
    assert bodies[:2] == bodies[2:]


# --- a stream that waits


def test_a_stream_waits_with_comments_and_then_says_all(
    chat: openai.OpenAI, running: Running
) -> None:
    running.hold()
    threading.Timer(0.9, lambda: running.hold(False)).start()
    begun = time.monotonic()
    chunks = list(chat.chat.completions.create(model="m", messages=user("wait"), stream=True))
    assert time.monotonic() - begun > 0.8
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "told wait"


def test_a_refusal_behind_the_status_line_is_an_event(running: Running) -> None:
    running.hold()
    threading.Timer(0.6, lambda: running.hold(False)).start()
    with (
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key("12/0")) as client,
        pytest.raises(openai.APIError, match="no room"),
    ):
        list(client.chat.completions.create(model="m", messages=user("busy"), stream=True))
    running.hold()
    threading.Timer(0.6, lambda: running.hold(False)).start()
    with (
        anthropic.Anthropic(base_url=running.url, api_key=running.key("12/1")) as claude,
        pytest.raises(anthropic.APIError, match="no room"),
        claude.messages.stream(model="m", max_tokens=5, messages=user("busy")) as stream,
    ):
        stream.get_final_message()


def test_an_early_refusal_of_a_stream_keeps_its_status(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.chat.completions.create(model="m", messages=user("w " * 1000), stream=True)


# --- Anthropic's messages


def test_messages_go_round_a_tool(claude: anthropic.Anthropic, running: Running) -> None:
    messages = user("go")
    asked = {"model": "m", "max_tokens": 50, "tools": [ANTHROPIC_TOOL], "system": [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."}]}  # fmt: skip
    first = claude.messages.create(**asked, messages=messages)
    assert (first.stop_reason, [block.type for block in first.content]) == (
        "tool_use",
        ["thinking", "tool_use"],
    )
    use = first.content[1]
    assert (use.name, use.input) == ("look", {"at": "é"})
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "found"}],
    }
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(**asked, messages=messages)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert second.content[1].text == "told found"
    seen = running.calls.requests[-1]
    assert [m["role"] for m in seen.messages] == ["system", "user", "assistant", "tool"]
    assert (seen.messages[0]["content"], seen.messages[2]["reasoning_content"]) == (
        "Be\nbrief.",
        "hm",
    )
    count = claude.messages.count_tokens(
        model="m", messages=messages, tools=[ANTHROPIC_TOOL], system=asked["system"]
    )
    assert count.input_tokens == second.usage.input_tokens + 1  # the fake counts a tool as one


def test_a_stream_of_messages_says_the_same(claude: anthropic.Anthropic, running: Running) -> None:
    for tools in ([ANTHROPIC_TOOL], []):
        asked = {"model": "m", "max_tokens": 50, "messages": user("stream"), "tools": tools}
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        left_out = {"id": True, "content": {"__all__": {"parsed_output", "signature"}}}
        assert streamed.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)


def test_a_stream_of_messages_waits_with_pings(
    claude: anthropic.Anthropic, running: Running
) -> None:
    running.hold()
    threading.Timer(0.7, lambda: running.hold(False)).start()
    with claude.messages.stream(model="m", max_tokens=5, messages=user("wait")) as stream:
        assert stream.get_final_text() == "told wait"


def test_ends_of_messages(claude: anthropic.Anthropic) -> None:
    ends = {"cut": "max_tokens", "stop": "stop_sequence", "a": "end_turn", "empty": "end_turn"}
    for text, end in ends.items():
        made = claude.messages.create(
            model="m", max_tokens=5, messages=user(text), stop_sequences=["X"]
        )
        assert (made.stop_reason, made.stop_sequence) == (end, "X" if text == "stop" else None)
        assert made.content[0].type == "text"
    with pytest.raises(anthropic.BadRequestError, match="no room"):
        claude.messages.create(model="m", max_tokens=5, messages=user("word " * 1000))


# --- responses


def test_responses_go_round_a_tool(chat: openai.OpenAI, running: Running) -> None:
    items: list[object] = [{"role": "user", "content": "go"}]
    asked = {"model": "m", "tools": [FLAT_TOOL], "instructions": "Be brief.", "store": False}
    first = chat.responses.create(**asked, input=items)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "é"})
    items += [item.model_dump() for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "found"})
    second = chat.responses.create(**asked, input=items)
    assert (second.output_text, second.status) == ("told found", "completed")
    seen = running.calls.requests[-1]
    assert [m["role"] for m in seen.messages] == ["system", "user", "assistant", "tool"]
    assert seen.messages[2]["reasoning_content"] == "hm"
    assert seen.messages[2]["tool_calls"][0]["function"]["arguments"] == {"at": "é"}


def test_a_stream_of_responses_says_the_same(chat: openai.OpenAI) -> None:
    for tools in ([FLAT_TOOL], openai.omit):
        asked = {"model": "m", "input": "stream it", "tools": tools}
        whole = chat.responses.create(**asked)
        with chat.responses.stream(**asked) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_response()
        assert events[0] == "response.created"
        assert events[-1] == "response.completed"
        assert [
            i.model_dump(exclude={"id", "content", "parsed_arguments"}) for i in streamed.output
        ] == [i.model_dump(exclude={"id", "content"}) for i in whole.output]
        assert streamed.output_text == whole.output_text
        assert streamed.usage == whole.usage


def test_ends_of_responses(chat: openai.OpenAI) -> None:
    cut = chat.responses.create(model="m", input="cut", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        chat.responses.create(model="m", input="a", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        chat.responses.create(model="m", input="a", tools=[{"type": "web_search"}])
