"""What clients seldom do: refusals, limits, hang-ups, many connections, and quirks of agents."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import select
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.port import CallRefusedError, CallRequest, Parsed
from tests.gateways import DEADLINE_S, NEVER_S, Running, Words, connected, gateway, head

HEADER = "x-rlstreams-is-trained"
TOOL = {"type": "function", "function": {"name": "look"}}
USER = [{"role": "user", "content": "a"}]
OUTCOME = {"reward": 1.0, "parts": {"format": 0.5}, "note": "n"}


def says(request: CallRequest) -> Parsed:
    if request.messages[-1]["content"] == "empty":
        return Parsed(content="")
    if request.messages[-1]["content"] == "surrogate":
        return Parsed(content="a\ud83d", reasoning="\ud83d")
    return Parsed(content="said")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with gateway(says, keepalive_s=0.2, max_body=100_000, max_connections=50) as made:
        yield made


def ask(
    running: Running, path: str, body: object, method: str = "POST", **headers: str
) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and body of one request."""
    place = urlsplit(running.url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=DEADLINE_S)
    carried = {"authorization": f"Bearer {running.key()}", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, carried)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    is_json = "json" in answer.headers.get("content-type", "")
    return answer.status, answer.headers, json.loads(text) if is_json else text.decode()


# --- quirks of agents


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"tools": [], "parallel_tool_calls": True}),
        ("chat/completions", {"stream_options": {"include_usage": True}}),
        ("chat/completions", {"max_tokens": 64_000, "model": "deep/path/of/a-model"}),
        ("chat/completions", {"temperature": None, "stop": None, "tools": None, "n": None}),
        ("chat/completions", {"stop": ["", ""], "tool_choice": "auto", "user": "x", "store": True}),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "none"}),
        ("chat/completions", {"response_format": {"type": "text"}, "logit_bias": {}}),
        ("chat/completions", {"messages": [{"role": "developer", "content": "b"}, *USER]}),
        ("chat/completions", {"messages": [{"role": "system", "content": "b"}] * 2 + USER}),
        ("chat/completions", {"messages": [*USER, {"role": "assistant", "content": None}]}),
        ("messages", {"max_tokens": 64_000, "metadata": {"user_id": "x"}, "system": ""}),
        ("messages", {"max_tokens": 5, "thinking": {"type": "disabled"}, "context_management": {}}),
        ("messages", {"max_tokens": 5, "tool_choice": {"type": "auto"}, "tools": []}),
        ("responses", {"input": [{"role": "developer", "content": "b"}], "include": []}),
        ("responses", {"input": "a", "reasoning": {"effort": "high"}, "text": {}}),
    ],
)
def test_what_agents_send_is_answered(running: Running, path: str, body: dict[str, Any]) -> None:
    status, _, answer = ask(running, f"/v1/{path}", {"model": "m", "messages": USER, **body})
    assert (status, "said" in json.dumps(answer)) == (200, True)


def test_usage_is_never_null(running: Running) -> None:
    """An agent that adds its parts up would end."""
    usage = ask(running, "/v1/chat/completions", {"messages": USER})[2]["usage"]
    assert all(value is not None for value in usage.values())
    assert all(
        isinstance(v, int) for name in usage if "details" in name for v in usage[name].values()
    )


def test_an_empty_answer_is_text(running: Running) -> None:
    """Null without a tool's call is no answer for an agent, which asks for ever."""
    messages = [{"role": "user", "content": "empty"}]
    for path, body in (("chat/completions", {}), ("messages", {"max_tokens": 5})):
        answer = ask(running, f"/v1/{path}", {"messages": messages, **body})[2]
        said = answer["choices"][0]["message"] if "choices" in answer else answer
        assert said["content"] in ("", [{"type": "text", "text": "", "citations": None}])


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_character_is_said_as_json_has_it(
    running: Running, path: str, stream: bool
) -> None:
    text = "surrogate"
    body = {"messages": [{"role": "user", "content": text}], "input": text, "max_tokens": 5}
    status, headers, answer = ask(running, f"/v1/{path}", {**body, "stream": stream})
    assert status == 200
    assert ("event-stream" in headers["content-type"]) == stream
    assert ("\\ud83d" in answer) if stream else answer


def test_counting_is_recorded_nowhere(running: Running) -> None:
    before = len(running.calls.requests)
    body = {"messages": USER, "tools": [{"name": "look"}]}
    assert ask(running, "/v1/messages/count_tokens", body)[2] == {"input_tokens": 2}
    assert len(running.calls.requests) == before


def test_an_upgrade_to_another_protocol_is_declined(running: Running) -> None:
    """An agent that tries a websocket first goes on with plain requests."""
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    status, _, answer = ask(running, "/v1/responses", b"", "GET", **headers)
    assert (status, answer["error"]["code"]) == (405, "not_found")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("chat/completions", ": waiting\n\n"),
        ("messages", "event: ping\ndata: "),
        ("responses", ": w"),
    ],
)
def test_a_stream_that_waits_says_so_and_later_what_was_overruled(
    running: Running, path: str, said: str
) -> None:
    """Its headers are gone by then: a comment says it."""
    running.hold()
    threading.Timer(0.7, lambda: running.hold(False)).start()
    body = {"messages": USER, "input": "a", "max_tokens": 9, "temperature": 0.25, "stream": True}
    status, headers, text = ask(running, f"/v1/{path}", body)
    assert (status, headers["x-rlstreams-overruled"]) == (200, None)
    assert text.startswith(said)
    assert ': x-rlstreams-overruled: {"temperature":0.25}\n\n' in text
    assert "said" in text


@pytest.mark.parametrize(
    ("path", "choice", "tool"),
    [
        ("chat/completions", "required", TOOL),
        ("responses", "required", {"type": "function", "name": "look"}),
        ("messages", {"type": "any"}, {"name": "look"}),
    ],
)
def test_whether_to_call_a_tool_is_the_policys_choice(
    running: Running, path: str, choice: object, tool: dict[str, Any]
) -> None:
    """Smolagents asks for some tool with each request: it is served, and told so."""
    body = {"messages": USER, "input": "a", "max_tokens": 9, "tools": [tool], "tool_choice": choice}
    status, headers, _ = ask(running, f"/v1/{path}", body)
    assert status == 200
    assert json.loads(headers["x-rlstreams-overruled"]) == {"tool_choice": choice}
    assert len(running.calls.requests[-1].tools) == 1


@pytest.mark.parametrize(
    "asked", [{"chat_template_kwargs": {}}, {"stop_token_ids": [7]}, {"parallel_tool_calls": False}]
)
def test_what_is_not_done_as_asked_is_told(running: Running, asked: dict[str, Any]) -> None:
    status, headers, _ = ask(running, "/v1/chat/completions", {"messages": USER, **asked})
    assert (status, json.loads(headers["x-rlstreams-overruled"])) == (200, asked)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_says_that_a_call_is_beside_the_task(
    running: Running, path: str, stream: bool
) -> None:
    """And is told that it was understood; the name that it asks for is kept, too."""
    body = {"model": "small", "messages": USER, "input": "a", "max_tokens": 4, "stream": stream}
    for said, answered in (({}, None), ({HEADER: "true"}, None), ({HEADER: "False"}, "false")):
        status, headers, _ = ask(running, f"/v1/{path}", body, **said)
        assert (status, headers[HEADER]) == (200, answered)
        request = running.calls.requests[-1]
        assert (request.is_trained, request.model) == (answered is None, "small")
    status, _, answer = ask(running, f"/v1/{path}", body, **{HEADER: "no"})
    assert (status, "must be true or false, got 'no'" in answer["error"]["message"]) == (400, True)


# --- refusals

BAD = [
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": ["x"]}, "messages[0]"),
    ("chat/completions", {"messages": "x"}, "messages"),
    ("chat/completions", {"messages": [{"role": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),  # noqa: E501
    ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("chat/completions", {"max_completion_tokens": "5"}, "max_completion_tokens"),
    ("chat/completions", {"n": 17}, "n"),
    ("chat/completions", {"n": 0}, "n"),
    ("chat/completions", {"stop": 5}, "stop"),
    ("chat/completions", {"stream": "yes"}, "stream"),
    ("chat/completions", {"tools": [{"type": "custom"}]}, "tools[0].type"),
    ("chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),  # noqa: E501
    ("chat/completions", {"functions": [{}]}, "functions"),
    ("chat/completions", {"modalities": ["audio"]}, "modalities"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"guided_regex": "a"}, "guided_regex"),
    ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),  # noqa: E501
    ("messages", {"max_tokens": None}, "max_tokens"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("messages", {"messages": [*USER, {"role": "assistant", "content": "A"}]}, "messages[1].role"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
    ("messages", {"tool_choice": {"type": "tool", "name": "x"}, "tools": [{"name": "x"}]}, "tool_choice"),  # noqa: E501
    ("messages", {"tool_choice": {"type": "x"}}, "tool_choice.type"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),  # noqa: E501
    ("responses", {"input": []}, "input"),
    ("responses", {"input": [{"type": "item_reference"}]}, "input[0].type"),
    ("responses", {"input": "a", "background": True}, "background"),
    ("responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "response_format"),
    ("outcome", {}, "outcome"),
    ("outcome", {"reward": "x"}, "outcome"),
    ("outcome", {"reward": float("nan")}, "reward"),
    ("outcome", {"reward": 1, "parts": {"a": float("inf")}}, "parts.a"),
    ("outcome", {"reward": 1, "rewards": 2}, "rewards"),
    ("outcome", {"reward": 1, "parts": {str(n): 0 for n in range(257)}}, "parts may have 256"),
    ("chat/completions", {"temperature": float("nan")}, "NaN is no number"),
    ("responses", {"input": "a", "metadata": {"a": float("inf")}}, "Infinity is no number"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), BAD)
def test_what_is_wrong_is_named_and_not_tried_again(
    running: Running, path: str, body: dict[str, Any], field: str
) -> None:
    whole = body if path == "outcome" else {"messages": USER, "max_tokens": 5, **body}
    if body == {}:
        whole = {}
    status, headers, answer = ask(running, f"/v1/{path}", whole)
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert field in answer["error"]["message"]
    assert answer["error"].get("type") == "invalid_request_error"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 90_000, b'{"messages": [{"role": "\xff"}]}']
)
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses", "outcome", "close"])
def test_what_is_no_json_is_refused(running: Running, path: str, data: bytes) -> None:
    status, headers, answer = ask(running, f"/v1/{path}", data)
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert answer["error"]["message"].startswith("body ")


def test_a_key_is_wanted_by_all_that_costs(running: Running) -> None:
    for path in (
        "chat/completions",
        "messages",
        "messages/count_tokens",
        "responses",
        "outcome",
        "close",
        "heartbeat",
    ):
        status, headers, answer = ask(running, f"/v1/{path}", b"", authorization="")
        assert (status, headers["x-should-retry"]) == (401, "false")
        assert "no API key" in answer["error"]["message"]
    assert ask(running, "/health", b"", "GET", authorization="")[2] == {"status": "ok"}


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/nothing", "/sessions/x/v1/nothing", "/v1/embeddings"]
)
def test_what_is_not_there(running: Running, path: str) -> None:
    status, _, answer = ask(running, path, {})
    assert (status, answer["error"]["code"]) == (404, "not_found")


def test_an_outcome_is_reported(running: Running) -> None:
    answer = ask(running, "/v1/outcome", OUTCOME)[2]
    assert answer["outcome_id"] == ask(running, "/v1/outcome", OUTCOME)[2]["outcome_id"]
    [report, _] = running.calls.reports[-2:]
    assert (report.reward, report.parts, report.note) == (1.0, {"format": 0.5}, "n")


def test_who_may_try_again_is_told_when(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: CallRequest) -> Parsed:
        raise CallRefusedError(429, "busy", "no room", retry_after_s=1.25)

    monkeypatch.setattr(running.calls, "says", busy)
    kinds = {"chat/completions": "rate_limit_error", "messages": "rate_limit_error"}
    for path, kind in kinds.items():
        body = {"messages": [{"role": "user", "content": "busy"}], "max_tokens": 5}
        status, headers, answer = ask(running, f"/v1/{path}", body)
        assert (status, answer["error"]["type"]) == (429, kind)
        told = [headers[name] for name in ("x-should-retry", "retry-after", "retry-after-ms")]
        assert told == ["true", "2", "1250"]


# --- limits


def test_a_body_that_says_it_is_too_long_is_not_read(running: Running) -> None:
    """The answer comes before a byte of it was sent."""
    with connected(running) as peer:
        peer.sendall(head(running, "content-length: 100001"))
        assert b" 413 " in peer.recv(1000).splitlines()[0]
    status, headers, answer = ask(running, "/v1/messages", b"x" * 100_001)
    assert (status, headers["x-should-retry"]) == (413, "false")
    assert answer["error"]["type"] == "request_too_large"


def test_a_body_is_read_of_those_alone_that_have_a_key(running: Running) -> None:
    with connected(running) as peer:
        foreign = f"x-api-key: {Keys('another').make('7/3', 0, NEVER_S)}"
        line = "POST /v1/chat/completions HTTP/1.1"
        peer.sendall(f"{line}\r\nhost: x\r\n{foreign}\r\ncontent-length: 9\r\n\r\n".encode())
        assert b" 401 " in peer.recv(1000).splitlines()[0]


def test_a_body_that_does_not_say_so_is_read_no_further(running: Running) -> None:
    with connected(running) as peer:
        peer.sendall(head(running, "transfer-encoding: chunked"))
        peer.sendall(b"".join(b"2710\r\n" + b"x" * 10_000 + b"\r\n" for _ in range(12)))
        assert b" 413 " in peer.recv(1000).splitlines()[0]


def test_a_client_that_hangs_up_ends_nothing(running: Running) -> None:
    """Neither one that waits for a body nor one that reads a stream: the call goes on. What it was
    answered nobody has heard, so who sends it again need not say that it is another try."""
    for stream, marked in itertools.product((False, True), (False, True)):
        limit = 7 + stream + 2 * marked
        body = json.dumps({"messages": USER, "seed": 1, "max_tokens": limit, "stream": stream})
        running.hold()
        before = len(running.calls.requests)
        with connected(running) as peer:
            peer.sendall(head(running, f"content-length: {len(body)}") + body.encode())
            deadline_s = time.monotonic() + DEADLINE_S
            while len(running.calls.requests) == before and time.monotonic() < deadline_s:
                time.sleep(0.01)
        time.sleep(0.3)
        running.hold(False)
        time.sleep(0.0 if marked else 0.3)  # it is answered meanwhile
        headers = {"x-stainless-retry-count": "1"} if marked else {}
        status, _, _ = ask(running, "/v1/chat/completions", body.encode(), **headers)
        assert (status, len(running.calls.requests)) == (200, before + 1)


def test_many_connections_do_not_use_up_what_a_process_may_open(running: Running) -> None:
    """Those above the bound are told so and closed; the others are answered."""
    refused = 0
    with ExitStack() as stack:
        held = [stack.enter_context(connected(running)) for _ in range(80)]
        deadline_s = time.monotonic() + DEADLINE_S
        while refused < 30 and time.monotonic() < deadline_s:
            told = select.select(held, [], [], 0.1)[0]
            refused += sum(b" 503 " in peer.recv(1000) for peer in told)
        assert refused >= 30
        held[0].settimeout(DEADLINE_S)
        held[0].sendall(head(running, "content-length: 2") + b"{}")
        assert b" 400 " in held[0].recv(1000).splitlines()[0]
    deadline_s = time.monotonic() + DEADLINE_S
    while (status := ask(running, "/health", b"", "GET")[0]) != 200:
        assert time.monotonic() < deadline_s, status
    assert status == 200


# --- keys and logs, start and end


def test_a_key_is_logged_nowhere(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a call that fails by a mistake of ours."""
    words = Words()
    for logger in (logging.getLogger(), logging.getLogger("rlstreams")):
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, words])
        monkeypatch.setattr(logger, "level", logging.DEBUG)
    monkeypatch.setattr(running.calls, "says", lambda _: 1 / 0)
    key = running.key("5/5")
    ask(running, f"/sessions/{key}/v1/chat/completions", {"messages": USER})
    ask(running, "/v1/messages", {"messages": USER, "max_tokens": 5}, **{"x-api-key": key})
    ask(running, f"/sessions/{key}/v1/nothing", {})
    until_s = time.monotonic() + DEADLINE_S  # its thread may answer first
    while not any("ZeroDivisionError" in line for line in list(words.lines)):
        assert time.monotonic() < until_s, words.lines
        time.sleep(0.01)
    assert not [line for line in words.lines if key in line or running.key() in line]
